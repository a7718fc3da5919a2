"""A tokenizer of bytes and a backend that says what it is told: a wrong token is a wrong letter."""

from __future__ import annotations

import asyncio
import codecs

import numpy as np

from models.draw import MAX_TOP
from mooncake_jax.frontend.backend import Started
from mooncake_jax.request import PrefillDone, PromptLogprobs, TokenEvent

EOS = 256


class ByteDetokenizer:
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids):
        return self._decoder.decode(bytes(token for token in token_ids if token < EOS))

    def flush(self):
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Token i is byte i; 256 ends a text. A chat is `role:content` lines."""

    vocab_size = 257
    eos_ids = (EOS,)

    def encode(self, text, add_bos=None):
        return list(text.encode())

    def chat(self, messages):
        if messages[-1]["role"] == "assistant":
            raise ValueError("the last message must not be the assistant's")
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < EOS else b"<end>"

    def detokenizer(self, *, continues=False):
        return ByteDetokenizer()


class ScriptedBackend:
    """Answers `text` token by token, cut as `max_tokens` says; the tokens come in events of `step`."""

    def __init__(
        self, text="", *, step=1, max_tokens=1000, error=None, fail_after=None, hang_after=None, eos=True
    ):
        self.tokens = list(text.encode()) + ([EOS] if eos else [])
        self.step, self.max_tokens, self.error = step, max_tokens, error
        self.fail_after, self.hang_after = fail_after, hang_after
        self.cluster = None
        self.requests, self.avoided = [], []
        self.num_open = 0
        self.num_closed = 0
        self.num_sent = 0

    async def start(self):
        pass

    async def close(self):
        pass

    async def generate(self, request, avoid=()):
        self.requests.append(request)
        self.avoided.append(list(avoid))
        self.num_open += 1
        try:
            if self.error and self.fail_after is None:
                raise self.error
            yield Started("prefill-0", "decode-0", 3, 2)
            if request.score_prompt:
                scored = len(request.tokens) - 1
                ranks = np.tile(np.arange(MAX_TOP), (scored, 1))
                logprobs = np.full(scored, -1.5)
                yield PromptLogprobs.of(logprobs, ord("a") + ranks, -2.0 - ranks, request.sampling.num_top)
            tokens = [t for t in self.tokens if t != EOS or EOS in request.stop_token_ids]
            ended = len(tokens) <= request.max_tokens
            tokens = tokens[: request.max_tokens]
            for i in range(0, len(tokens), self.step):
                if self.fail_after is not None and i >= self.fail_after:
                    raise self.error
                if self.hang_after is not None and i >= self.hang_after:
                    await asyncio.Event().wait()
                part = tokens[i : i + self.step]
                last = i + self.step >= len(tokens)
                reason = "stop" if ended and EOS in request.stop_token_ids else "length"
                self.num_sent += len(part)
                num_top = request.sampling.num_top
                top = [(ord("a") + j, -1.0 - j) for j in range(num_top)]
                tops = [top] * len(part) if num_top else []
                yield TokenEvent(part, [-0.5] * len(part), reason if last else None, tops)
                if i == 0:
                    yield PrefillDone(0.25, 0.5, 0.0, 10)
        finally:
            self.num_open -= 1
            self.num_closed += 1

"""Tokens to text: characters stay whole, stop strings are cut out, the end-of-text token is not shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from mooncake_jax.frontend.stops import StopMatcher
from mooncake_jax.request import FinishReason, TokenEvent, TopToken


class Detokenizer(Protocol):
    """The text of one token sequence, piece by piece."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete, possibly none."""
        ...

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD."""
        ...


class Tokenizer(Protocol):
    """What the frontend needs of `models.tokenizer`."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ...

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of a plain prompt; `add_bos` None: as the model wants it.

        Raises ValueError for text that cannot be encoded.
        """
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises ValueError if that fails."""
        ...

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """`continues`: the tokens go on in the middle of a text, so that a space they begin with is its own."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; not always UTF-8 by itself."""
        ...


class Delta(msgspec.Struct, frozen=True):
    """What one event adds to an answer. `pieces[i]` is the text that `tokens[i]` completed, before a cut.

    `tops` has one entry per token, or none at all. The first token of a prompt has no log probability.
    """

    text: str
    tokens: list[int]
    pieces: list[str]
    logprobs: Sequence[float | None]
    finish: FinishReason | None
    tops: Sequence[list[TopToken] | None] = []


class AnswerText:
    """Turns token events into deltas whose texts, joined, are the answer."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], stop_ids: Sequence[int], min_tokens: int = 0
    ):
        """Stop strings are looked for in the text behind the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stop_ids = frozenset(stop_ids)
        self._num_exempt = min_tokens

    def push(self, event: TokenEvent) -> Delta:
        """The next delta; tokens behind a completed stop string are dropped, and its `finish` is "stop"."""
        text, pieces = "", []
        for token in event.tokens:
            piece = "" if token in self._stop_ids else self._detokenizer.push([token])
            pieces.append(piece)
            if self._num_exempt:
                self._num_exempt -= 1
                text += piece
                continue
            text += self._matcher.push(piece)
            if self._matcher.stopped:
                break
        finish = event.finish
        if finish and not self._matcher.stopped:
            rest = self._detokenizer.flush()
            text += self._matcher.push(rest) + self._matcher.flush()
            if pieces:
                pieces[-1] += rest
        if self._matcher.stopped:
            finish = "stop"
        used = len(pieces)
        return Delta(text, event.tokens[:used], pieces, event.logprobs[:used], finish, event.tops[:used])


def token_name(token: int, raw: bytes) -> str:
    """One token as text; "bytes:" and its bytes in hexadecimal where they are no whole characters; "token_id:"
    and its id where it has none (vocabularies are padded)."""
    if not raw:
        return f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

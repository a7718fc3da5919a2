"""The HTTP API over a cluster of real engines."""

from __future__ import annotations

import json
from typing import NamedTuple

from cases.judge import CANARY, MAX_TOKENS, Judge
from tokenizers.pre_tokenizers import ByteLevel

from models.tokenizer import Tokenizer, TokenizerSettings, byte_level_bpe

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
LETTERS = sorted(ByteLevel.alphabet())


def bos_tokenizer() -> Tokenizer:
    """The byte tokenizer, and a BOS before every text."""
    bos, template = len(LETTERS), "{% for m in messages %}{{ m.content }}{% endfor %}"
    backend = byte_level_bpe([*LETTERS, "<|begin|>"], [], pre_tokenizer="gpt-2", control=[bos])
    return Tokenizer(backend, TokenizerSettings(bos_id=bos, add_bos=True, chat_template=template))


class Served(NamedTuple):
    """A frontend before 1P1D of real engines, with the judge beside it."""

    cluster: object
    frontend: object
    judge: Judge
    tokenizer: Tokenizer

    def post(self, path, body, **headers):
        """(status, parsed body)"""
        raw = (
            body
            if isinstance(body, bytes)
            else json.dumps({"model": "fake", "temperature": 0} | body).encode()
        )
        status, reply = self.frontend.request("POST", path, raw, JSON | headers)
        return status, json.loads(reply)

    def canary(self):
        """Also through HTTP."""
        self.judge.right_reply(CANARY, self.frontend.ask(CANARY, MAX_TOKENS, logprobs=0))
        self.judge.canary(self.cluster)
        for path in ("/health", "/ready"):
            assert self.frontend.request("GET", path)[0] == 200

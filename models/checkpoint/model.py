"""A loaded model: everything that a checkpoint, of whatever format, turns into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from models.checkpoint.fingerprint import weights_fingerprint
from models.config import LlamaConfig
from models.llama import Params
from models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """`params` as `models.llama.param_table(cfg)` says, all of `dtype`; no tokenizer for random weights."""

    cfg: LlamaConfig
    params: Params
    tokenizer: Tokenizer | None
    dtype: str

    @cached_property
    def fingerprint(self) -> bytes:
        """`weights_fingerprint` of what is in memory; computed at the first use."""
        return weights_fingerprint(self.cfg, self.params)

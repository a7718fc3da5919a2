"""What an engine can take at all; both roles refuse anything else before it can disturb a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvstore.errors import InvalidError


class Limits(Protocol):
    """The part of an engine that says it."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def check_length(engine: Limits, num_tokens: int, max_tokens: int) -> None:
    """Raises InvalidError, naming both lengths, for a prompt and answer that can never fit."""
    if num_tokens + max_tokens > engine.max_tokens:
        raise InvalidError(
            f"prompt of {num_tokens} tokens and an answer of up to {max_tokens} exceed the"
            f" {engine.max_tokens} tokens of this model: shorten one of them"
        )


def check_tokens(engine: Limits, tokens: Sequence[int]) -> None:
    """Raises InvalidError for token ids that the model does not have."""
    largest = int(np.max(tokens))
    if largest >= engine.vocab_size:
        raise InvalidError(f"token id {largest}: the vocabulary has {engine.vocab_size}")

"""Tokens that files beside a vocabulary add to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tokenizers

Backend = tokenizers.Tokenizer


class AddedToken(NamedTuple):
    """A token found in text whole; a special one is dropped when decoding. It may take in spaces beside it."""

    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


def add_tokens(backend: Backend, tokens: Mapping[int, AddedToken]) -> None:
    """Add `tokens` by id: known ones keep their place, new ones stand at the end. Raises ValueError if they cannot."""
    for index, token in sorted(tokens.items()):
        known = backend.token_to_id(token.text) is not None
        if not known or token.special:
            backend.add_tokens(
                [
                    tokenizers.AddedToken(
                        token.text,
                        special=token.special,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        normalized=False,
                    )
                ]
            )
        if (have := backend.token_to_id(token.text)) != index:
            raise ValueError(
                f"added token {token.text!r} has id {index}, but is {have} in the vocabulary with the tokens "
                "added before it"
            )

"""Scores of a prompt's tiles as they are sent to whoever asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake_jax.engine.contract import PromptScores
from mooncake_jax.request import PromptLogprobs


def prompt_logprobs(tiles: Sequence[PromptScores], num_top: int) -> PromptLogprobs:
    """Joins the tiles' scores, keeping the `num_top` most likely tokens of each place. No tiles: of one token."""
    if not tiles:
        return PromptLogprobs(num_top, b"", b"", b"")
    whole = PromptScores(*map(np.concatenate, zip(*tiles, strict=True)))
    return PromptLogprobs.of(whole.logprobs, whole.top_tokens, whole.top_logprobs, num_top)

"""Scores of a prompt's tiles as they are sent to whoever asked."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_jax.engine.contract import PromptScores, top_of
from mooncake_jax.request import PromptLogprobs


def prompt_logprobs(tiles: Sequence[PromptScores], num_top: int) -> PromptLogprobs:
    """Joins the tiles' scores, keeping the `num_top` most likely tokens of each place."""
    logprobs = [logprob for tile in tiles for logprob in tile.logprobs.tolist()]
    tops = [
        top_of(tokens, best, num_top)
        for tile in tiles
        for tokens, best in zip(tile.top_tokens, tile.top_logprobs, strict=True)
    ]
    return PromptLogprobs(logprobs, tops)

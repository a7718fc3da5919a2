"""Which request computes its next tile: the shortest remaining one, less a head start for having waited.

A request's rank is `seconds of work left - aging * seconds waited`, lowest first; time in service is not
waiting. While two requests wait, their order never flips, and with `aging` ≤ 1 nothing that already waits
overtakes the one in service: a request in progress is preempted, at a tile edge, only by a newcomer that has
less left. Nobody starves: `w` seconds of work begin after at most about `w / aging` seconds of shorter ones,
and take back no more than `aging` times what they waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_UNKNOWN_SPEED = 1000.0  # tokens per second, before anything was measured


@dataclass(frozen=True)
class Candidate:
    """A request that could compute a tile now."""

    waited_seconds: float  # since it came, less the time its tiles took
    remaining_tokens: int  # not cached and not yet computed
    holds_slot: bool  # it has begun


def choose(
    candidates: Sequence[Candidate], *, tokens_per_second: float, free_slots: int, aging: float
) -> int | None:
    """Index of the candidate whose tile runs next, or None. To begin, one needs a free engine slot."""
    speed = tokens_per_second if tokens_per_second > 0 else _UNKNOWN_SPEED

    def rank(index: int) -> tuple[float, float, int]:
        one = candidates[index]
        return (one.remaining_tokens / speed - aging * one.waited_seconds, -one.waited_seconds, index)

    eligible = (i for i, one in enumerate(candidates) if one.holds_slot or free_slots > 0)
    return min(eligible, key=rank, default=None)


def next_tile(start: int, num_tokens: int, tile_tokens: int) -> tuple[int, int]:
    """`[start, stop)` of the tile after `start` tokens of a prompt of `num_tokens`."""
    if not 0 <= start < num_tokens:
        raise ValueError(f"no tile after {start} of {num_tokens} tokens")
    return start, min(start + tile_tokens, num_tokens)

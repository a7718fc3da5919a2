"""Which prompts a prefill instance computes in its next pass: strategies behind one signature.

`take(waiting, now)` returns `(position, stop)` pairs: the prompt at that position of the queue is computed up to
token `stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mooncake_jax.prefill.discipline import Candidate, choose, next_tile

DisciplineName = Literal["fifo", "batch", "tiles"]
_AGING = 0.5


@dataclass(slots=True, eq=False)
class Waiting:
    """A prompt whose prefix is there."""

    request: int
    num_tokens: int
    num_prefix: int  # reused
    num_done: int  # reused or computed
    since: float
    served_seconds: float = 0.0


Discipline = Callable[[Sequence[Waiting], float], list[tuple[int, int]]]


def fifo(waiting: Sequence[Waiting], now: float) -> list[tuple[int, int]]:
    """The first, whole."""
    return [(0, waiting[0].num_tokens)]


def batch(waiting: Sequence[Waiting], now: float) -> list[tuple[int, int]]:
    """All that wait, together: the pass's base is paid once, and all end with it."""
    return [(position, one.num_tokens) for position, one in enumerate(waiting)]


def tiles(
    waiting: Sequence[Waiting], now: float, *, tile_tokens: int, tokens_per_second: float
) -> list[tuple[int, int]]:
    """One tile of the prompt that the running system's discipline chooses."""
    candidates = [
        Candidate(
            now - one.since - one.served_seconds, one.num_tokens - one.num_done, one.num_done > one.num_prefix
        )
        for one in waiting
    ]
    position = choose(candidates, tokens_per_second=tokens_per_second, free_slots=len(waiting), aging=_AGING)
    if position is None:
        raise ValueError("no prompt waits")
    one = waiting[position]
    return [(position, next_tile(one.num_done, one.num_tokens, tile_tokens)[1])]


def discipline(name: DisciplineName, *, tile_tokens: int, tokens_per_second: float) -> Discipline:
    if name == "tiles":
        return partial(tiles, tile_tokens=tile_tokens, tokens_per_second=tokens_per_second)
    return {"fifo": fifo, "batch": batch}[name]

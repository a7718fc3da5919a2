"""The schedule of chunked pipeline parallelism: which chunk each stage computes at each tick. Pure, and no arrays.

Chunk c enters stage 0 at tick c and is on stage x at tick c + x. Chunks of one request enter in order; the next
request's follow without a gap, so that the pipeline drains when there is nothing left to do, and not between requests
(Mooncake, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Tokens start … stop-1 of a request's prompt, whose KV is kept in `slot`."""

    request: int
    slot: int
    start: int
    stop: int
    is_last: bool = False  # of its request

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


Tick = tuple[Chunk | None, ...]  # what each stage computes, `[X]`; None: a bubble


def cut(request: int, slot: int, start: int, stop: int, chunk_tokens: int) -> list[Chunk]:
    """Equal chunks of a prompt whose first `start` tokens are cached, and a ragged last one.

    Raises ValueError when there is nothing to compute.
    """
    return _chunks(request, slot, [*range(start, stop, chunk_tokens), stop])


def cut_balanced(
    request: int, slot: int, start: int, stop: int, num_chunks: int, *, attention_share: float, multiple: int
) -> list[Chunk]:
    """At most `num_chunks` chunks that take equal time: later ones, which attend to more keys, are shorter.

    `attention_share` is what one more key to attend to costs a token, as a share of what the token costs without any.
    Edges are multiples of `multiple` after `start`. Raises ValueError when there is nothing to compute.
    """

    def work(position: float) -> float:  # of all tokens before it
        return position + attention_share * position * position / 2

    def position(work: float) -> float:
        if attention_share == 0.0:
            return work
        return (math.sqrt(1.0 + 2.0 * attention_share * work) - 1.0) / attention_share

    first, last = work(start), work(stop)
    edges = [start]
    for i in range(1, num_chunks):
        ideal = position(first + (last - first) * i / num_chunks)
        edge = start + round((ideal - start) / multiple) * multiple
        if edges[-1] < edge < stop:
            edges.append(edge)
    return _chunks(request, slot, [*edges, stop])


def _chunks(request: int, slot: int, edges: Sequence[int]) -> list[Chunk]:
    if len(edges) < 2 or edges[-2] >= edges[-1]:
        raise ValueError(f"request {request}: no tokens to compute between {edges[0]} and {edges[-1]}")
    last = len(edges) - 2
    return [Chunk(request, slot, edges[i], edges[i + 1], i == last) for i in range(last + 1)]


def shift(tick: Tick, entering: Chunk | None) -> Tick:
    """The next tick: every chunk moves one stage on, and `entering` begins at stage 0."""
    return (entering, *tick[:-1])


def stream(chunks: Iterable[Chunk], num_stages: int) -> Iterator[Tick]:
    """All ticks of these chunks, until the last one has left stage X-1."""
    tick: Tick = (None,) * num_stages
    for chunk in chunks:
        tick = shift(tick, chunk)
        yield tick
    while any(tick[:-1]):
        tick = shift(tick, None)
        yield tick


@dataclass(frozen=True)
class Occupancy:
    """Of the cells (stage, tick), how many were computed and how many there are."""

    busy: int
    cells: int

    @property
    def bubble_fraction(self) -> float:
        """0 when every stage had a chunk at every tick."""
        return 1.0 - self.busy / self.cells if self.cells else 0.0


def occupancy(ticks: Iterable[Tick]) -> Occupancy:
    """Counted from the ticks that were run; C chunks without a gap give bubbles of (X-1)/(C+X-1)."""
    busy = cells = 0
    for tick in ticks:
        busy += sum(chunk is not None for chunk in tick)
        cells += len(tick)
    return Occupancy(busy, cells)


def finish_seconds(
    chunks: Sequence[Chunk],
    num_stages: int,
    stage_seconds: Callable[[Chunk], float],
    hop_seconds: Callable[[Chunk], float] = lambda chunk: 0.0,
) -> list[float]:
    """When each chunk leaves the last stage, if stage 0 begins the first one at 0 and stages wait for nothing but
    their own last chunk and the activations of the stage before, which take `hop_seconds` to come."""
    free = [0.0] * num_stages
    finished = []
    for chunk in chunks:
        here = 0.0
        for stage in range(num_stages):
            here = max(here, free[stage]) + stage_seconds(chunk)
            free[stage] = here
            here += hop_seconds(chunk) if stage + 1 < num_stages else 0.0
        finished.append(here)
    return finished

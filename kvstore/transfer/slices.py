"""Pure decisions on byte ranges: how requests are cut into frames, what is in bounds, what is adjacent.

A table is two int64 arrays `[M]`, offsets and lengths: one range of a segment per row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_FRAME_NBYTES = 16 << 20
MIN_FRAME_NBYTES = 1 << 20
MAX_NBYTES_OF_MANY_RAILS = 2 << 20
MAX_FRAME_PIECES = 1024


class Cut(NamedTuple):
    """A frame of a list of requests: all of `first:last`, or `nbytes` of request `first` from `start`."""

    first: int
    last: int
    start: int
    nbytes: int


def frame_nbytes(total_nbytes: int, lanes: int, rails: int = 1) -> int:
    """Largest frame for `total_nbytes` shared by `lanes` connections on each of `rails`.

    Small enough that each connection gets a share. With several rails small enough, too, that they end at about
    the same time, and that little is sent twice when one fails.
    """
    largest = MAX_FRAME_NBYTES if rails == 1 else MAX_NBYTES_OF_MANY_RAILS
    return min(largest, max(MIN_FRAME_NBYTES, -(-total_nbytes // (lanes * max(1, rails)))))


def cut(lengths: np.ndarray, max_nbytes: int, max_pieces: int = MAX_FRAME_PIECES) -> list[Cut]:
    """Cuts requests of `lengths` bytes `[M]` into frames, in order: every byte in exactly one frame.

    Requests that fit travel whole, as many to a frame as fit; a larger one is cut into frames of its own.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    cuts, first = [], 0
    while first < len(lengths):
        begin = int(ends[first]) - int(lengths[first])
        last = int(np.searchsorted(ends, begin + max_nbytes, side="right"))
        last = min(last, first + max_pieces)
        if last > first:
            cuts.append(Cut(first, last, 0, int(ends[last - 1]) - begin))
            first = last
            continue
        size = int(lengths[first])
        cuts += [Cut(first, first + 1, at, min(max_nbytes, size - at)) for at in range(0, size, max_nbytes)]
        first += 1
    return cuts


def out_of_bounds(offsets: np.ndarray, lengths: np.ndarray, nbytes: int) -> np.ndarray:
    """Row numbers of the ranges that do not lie within `0:nbytes`; no sum here can overflow."""
    inside = (offsets >= 0) & (lengths >= 0) & (lengths <= nbytes)
    inside &= offsets <= nbytes - np.where(inside, lengths, 0)
    return np.flatnonzero(~inside)


def bounds_reason(offsets: np.ndarray, lengths: np.ndarray, row: int, name: str, nbytes: int) -> str:
    """The one sentence that reports a range which misses its segment."""
    return f"{lengths[row]} bytes at {offsets[row]} are out of bounds of segment {name!r} of {nbytes} bytes"


def merge_adjacent(offsets: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same bytes in the same order as fewer ranges: each that begins where the last ends joins it."""
    if len(offsets) < 2:
        return offsets, lengths
    starts = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + lengths[:-1]))
    return offsets[starts], np.add.reduceat(lengths, starts)

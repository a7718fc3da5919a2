"""Copies between this process's buffers, with the crc32 of each part on the way; large batches on two threads."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np

_NUM_THREADS = 2  # one core does not fill the memory bus, nor compute crcs at its speed
_INLINE_NBYTES = 1 << 20  # cheaper copied at once than to wake threads
_NUMPY_NBYTES = 32 << 10  # from here on NumPy copies, which releases the GIL
_T = TypeVar("_T")
Pair = tuple[memoryview, memoryview]  # to, from: bytes of equal length


class Copier:
    """Thread-safe. NumPy copies and zlib computes without the GIL."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvstore-copy")

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy each pair."""
        self._each(_copy, pairs)

    def copy_parts(self, pairs: Sequence[Pair], part_nbytes: int) -> list[tuple[int, ...]]:
        """Copy each pair part by part; the crc32s of its parts."""
        return self._each(lambda pair: _copy_parts(pair, part_nbytes), pairs)

    def close(self) -> None:
        """Join the threads."""
        self._pool.shutdown(wait=True)

    def _each(self, call: Callable[[Pair], _T], pairs: Sequence[Pair]) -> list[_T]:
        small = len(pairs) < 2 or sum(len(to) for to, _ in pairs) <= _INLINE_NBYTES
        if small:
            return [call(pair) for pair in pairs]
        copies = [self._pool.submit(call, pair) for pair in pairs]
        wait(copies)  # also when one fails: nothing is written to after this returns
        return [copy.result() for copy in copies]


def _copy(pair: Pair) -> None:
    to, source = pair
    if len(to) < _NUMPY_NBYTES:
        to[:] = source
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))


def _copy_parts(pair: Pair, part_nbytes: int) -> tuple[int, ...]:
    to, source = pair
    crcs = []
    for start in range(0, len(to), part_nbytes):
        part = to[start : start + part_nbytes]
        _copy((part, source[start : start + part_nbytes]))
        crcs.append(zlib.crc32(part))  # of what arrived, while it is in this core's cache
    return tuple(crcs)

"""Copies between this process's buffers; large batches on two threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

_NUM_THREADS = 2  # one core does not fill the memory bus
_INLINE_NBYTES = 1 << 20  # cheaper copied at once than to wake threads
_NUMPY_NBYTES = 32 << 10  # from here on NumPy copies, which releases the GIL
Pair = tuple[memoryview, memoryview]  # to, from: bytes of equal length


class Copier:
    """Thread-safe. NumPy copies without the GIL."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvstore-copy")

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy each pair."""
        if len(pairs) < 2 or sum(len(to) for to, _ in pairs) <= _INLINE_NBYTES:
            for pair in pairs:
                _copy(pair)
            return
        copies = [self._pool.submit(_copy, pair) for pair in pairs]
        wait(copies)  # also when one fails: nothing is written to after this returns
        for copied in copies:
            copied.result()

    def close(self) -> None:
        """Join the threads."""
        self._pool.shutdown(wait=True)


def _copy(pair: Pair) -> None:
    to, source = pair
    if len(to) < _NUMPY_NBYTES:
        to[:] = source
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))

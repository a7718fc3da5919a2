"""Memory to memory: a few threads copy frames between local memory and segments mapped in this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np

from kvstore.transfer.batch import Frame
from kvstore.transfer.request import READ
from kvstore.transfer.segment import Peer
from kvstore.transfer.slices import bounds_reason, frame_nbytes, out_of_bounds
from kvstore.transfer.status import TransferError

NUM_THREADS = 2
INLINE_NBYTES = 256 << 10  # copied by the caller at once: cheaper than to wake a thread
_NUMPY_NBYTES = 32 << 10  # from here on numpy copies, which releases the GIL


class Copier(ABC):
    """A path whose segments are in this process's address space."""

    def __init__(self, name: str):
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"transfer-{name}")

    @abstractmethod
    def use(self, frame: Frame) -> AbstractContextManager[memoryview]:
        """The whole memory of the frame's segment, which stays there until the context ends.

        Raises TransferError if the frame may not use it.
        """

    def frame_nbytes(self, peer: Peer, total_nbytes: int) -> int:
        """Largest frame for `total_nbytes`."""
        return frame_nbytes(total_nbytes, NUM_THREADS)

    def submit(self, frames: list[Frame]) -> None:
        """Queues frames; small ones are copied before it returns."""
        for frame in frames:
            if frame.nbytes <= INLINE_NBYTES and not frame.delay_seconds:
                frame.carry(self._move, self._closed)
                continue
            try:
                self._pool.submit(frame.carry, self._move, self._closed)
            except RuntimeError:  # closed meanwhile
                frame.refuse("the engine was closed")

    def _move(self, frame: Frame) -> None:
        if self._closed.is_set():
            raise TransferError("the engine was closed")
        with self.use(frame) as memory:
            copy(frame, memory)

    def close(self) -> None:
        """Fails what is queued, lets running copies end, and joins every thread."""
        self._closed.set()
        self._pool.shutdown(wait=True)


def copy(frame: Frame, memory: memoryview) -> None:
    """Moves the frame's bytes from or to `memory`, the whole segment. Raises TransferError if it may not."""
    wrong = out_of_bounds(frame.offsets, frame.lengths, len(memory))
    if len(wrong):
        name = frame.target.name
        raise TransferError(bounds_reason(frame.offsets, frame.lengths, int(wrong[0]), name, len(memory)))
    if frame.opcode is not READ and memory.readonly:
        raise TransferError(f"segment {frame.target.name!r} is read-only")
    for local, offset, length in zip(
        frame.views, frame.offsets.tolist(), frame.lengths.tolist(), strict=True
    ):
        remote = memory[offset : offset + length]
        target, source = (local, remote) if frame.opcode is READ else (remote, local)
        if length >= _NUMPY_NBYTES:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        else:
            target[:] = source

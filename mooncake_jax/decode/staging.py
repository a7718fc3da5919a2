"""Registered memory that prefill instances stream prompts' KV into, one region per request, lent by handle.

A region is reserved, then taken by `generate` or released, or its lease runs out. Memory that a writer may
still write to is not lent again: it rests until its flags show that all has arrived, or for
`quarantine_seconds`.
"""

from __future__ import annotations

import heapq
import threading
import zlib
from dataclasses import dataclass

import numpy as np

from kvstore.block import BlockFormat
from kvstore.errors import ExhaustedError, InternalError, InvalidError, NotFoundError, StaleError, StoreError
from kvstore.transfer.segment import Segment
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.decode.regions import Regions
from mooncake_jax.request import StagingHandle
from mooncake_jax.staging_layout import FLAG_DTYPE, PAGE_NBYTES, StagingLayout

_LAST_GENERATION = 2**32 - 1


class StagedKV:
    """One prompt's region: the flags and blocks behind a handle."""

    def __init__(self, memory: np.ndarray, handle: StagingHandle, block_format: BlockFormat):
        """`memory`: the whole segment, uint8."""
        self.handle = handle
        self._format = block_format
        layout = StagingLayout(block_format, handle.num_blocks)
        region = memory[handle.offset : handle.offset + layout.nbytes]
        flags_nbytes = handle.num_blocks * layout.row_nbytes
        self.flags = region[:flags_nbytes].view(FLAG_DTYPE).reshape(layout.flags_shape)
        self._bytes = region[layout.blocks_offset :]
        self.blocks = self._bytes.view(block_format.item_dtype).reshape(
            handle.num_blocks, *block_format.shape
        )

    @property
    def num_arrived(self) -> int:
        """How many (block, layer group) have arrived."""
        return int(np.count_nonzero(self.flags[:, :, 0] == self.handle.generation))

    @property
    def is_complete(self) -> bool:
        return self.num_arrived == self.flags.shape[0] * self.flags.shape[1]

    def verify(self, first_block: int = 0, num_blocks: int | None = None) -> None:
        """Compares every layer group of these blocks, or of all, with its crc32 (about 7 GB/s).

        Raises InternalError.
        """
        size, num_groups = self._format.group_nbytes, self._format.num_groups
        stop = len(self.flags) if num_blocks is None else first_block + num_blocks
        flags = self.flags[first_block:stop].reshape(-1, 2).tolist()
        for index, (generation, crc) in enumerate(flags, first_block * num_groups):
            found = zlib.crc32(self._bytes[index * size : (index + 1) * size].data)
            if generation != self.handle.generation or found != crc:
                block, group = divmod(index, num_groups)
                raise InternalError(
                    f"KV of block {block}, layer group {group} arrived damaged:"
                    f" crc32 {found:08x}, sent {crc:08x}"
                )


@dataclass
class _Loan:
    request_id: str
    kv: StagedKV
    lease_until: float
    num_arrived: int = 0
    is_taken: bool = False


def _name_of(handle: StagingHandle) -> str:
    return f"staging handle (slot {handle.slot}, generation {handle.generation})"


class Staging:
    """The regions and their handles. Thread-safe; times are seconds on the caller's clock."""

    def __init__(
        self,
        name: str,
        epoch: int,
        block_format: BlockFormat,
        memory: np.ndarray,
        segment: Segment,
        config: DecodeConfig,
    ):
        """`memory`: uint8, what `segment` names."""
        self._name, self._epoch = name, epoch
        self._format, self._memory, self._segment = block_format, memory, segment
        self._config = config
        self._lock = threading.Lock()
        self._regions = Regions(memory.nbytes, PAGE_NBYTES)
        self._loans: dict[int, _Loan] = {}  # by slot
        self._free_slots: list[int] = []
        self._ends: list[tuple[int, str]] = []  # by slot: generation and how its last loan ended
        self._resting: list[tuple[StagedKV, float]] = []
        self._generation = 0
        self._num_refused = 0

    def reserve(self, request_id: str, prompt_tokens: int, now_seconds: float) -> StagingHandle:
        """Memory for the KV of a request's prompt.

        Raises InvalidError if it can never fit, ExhaustedError if not now.
        """
        num_blocks = self._format.num_blocks(prompt_tokens)
        nbytes = StagingLayout(self._format, num_blocks).nbytes
        with self._lock:
            self._sweep(now_seconds)
            if not self._regions.fits(nbytes):
                raise InvalidError(
                    f"a prompt of {prompt_tokens} tokens needs {nbytes} bytes of staging memory, there are"
                    f" {self._regions.nbytes} in all: give the decode instance more, or send shorter prompts"
                )
            offset = self._regions.take(nbytes)
            if offset is None:
                raise ExhaustedError(
                    f"no {nbytes} bytes of staging memory in one piece now ({self._regions.used_nbytes} of"
                    f" {self._regions.nbytes} in use): try again"
                )
            if not self._free_slots:
                heapq.heappush(self._free_slots, len(self._ends))
                self._ends.append((0, ""))
            slot = heapq.heappop(self._free_slots)
            self._generation = self._generation % _LAST_GENERATION + 1
            handle = StagingHandle(
                instance=self._name,
                epoch=self._epoch,
                slot=slot,
                generation=self._generation,
                segment=self._segment,
                offset=offset,
                num_blocks=num_blocks,
                lease_seconds=self._config.staging_lease_seconds,
            )
            kv = StagedKV(self._memory, handle, self._format)
            kv.flags[:] = 0
            self._loans[slot] = _Loan(request_id, kv, now_seconds + handle.lease_seconds)
            return handle

    def take(self, handle: StagingHandle, request_id: str, now_seconds: float) -> StagedKV:
        """The KV behind a handle, which is good once; give it back by `end`.

        Raises StaleError for a handle of an earlier epoch or that was used, released or has expired,
        NotFoundError for one that was never given out like this, or for another request. Each such handle
        adds one to `num_refused`.
        """
        with self._lock:
            self._sweep(now_seconds)
            try:
                loan = self._open_loan(handle)
                if loan.request_id != request_id:
                    raise NotFoundError(f"{_name_of(handle)} was not given out for request {request_id!r}")
            except StoreError:
                self._num_refused += 1
                raise
            loan.is_taken = True
            return loan.kv

    def release(self, handle: StagingHandle, now_seconds: float) -> None:
        """A reservation that will not be used.

        Raises as `take` does, but to give up what is over is not counted.
        """
        with self._lock:
            self._sweep(now_seconds)
            self._end(self._open_loan(handle), "released", now_seconds)

    def end(self, kv: StagedKV, now_seconds: float) -> None:
        """What `take` gave is not needed any more; once is enough."""
        with self._lock:
            loan = self._loans.get(kv.handle.slot)
            if loan is not None and loan.kv is kv:
                self._end(loan, "used", now_seconds)

    @property
    def num_refused(self) -> int:
        """Handles refused, since the start."""
        return self._num_refused

    def books(self, now_seconds: float) -> dict[str, float]:
        """All zero when nothing is reserved, in use or resting."""
        with self._lock:
            self._sweep(now_seconds)
            taken = sum(loan.is_taken for loan in self._loans.values())
            return {
                "staging_reserved": len(self._loans) - taken,
                "staging_taken": taken,
                "staging_resting": len(self._resting),
                "staging_nbytes": self._regions.used_nbytes,
            }

    def _open_loan(self, handle: StagingHandle) -> _Loan:
        name = _name_of(handle)
        if (handle.instance, handle.epoch) != (self._name, self._epoch):
            raise StaleError(
                f"{name} is of {handle.instance!r} epoch {handle.epoch:x}; this is {self._name!r} epoch"
                f" {self._epoch:x}: reserve again"
            )
        loan = self._loans.get(handle.slot)
        if loan is not None and loan.kv.handle == handle:
            if loan.is_taken:
                raise StaleError(f"{name} was used already")
            return loan
        generation, how = self._ends[handle.slot] if handle.slot < len(self._ends) else (0, "")
        if handle.generation == generation:
            raise StaleError(f"{name} was {how} already: reserve again")
        newest = loan.kv.handle.generation if loan is not None else generation
        if handle.generation < newest:
            raise StaleError(f"{name} is older than the slot's generation {newest}: reserve again")
        raise NotFoundError(
            f"{name} was never given out for these {handle.num_blocks} blocks at {handle.offset}"
        )

    def _end(self, loan: _Loan, how: str, now_seconds: float) -> None:
        handle = loan.kv.handle
        del self._loans[handle.slot]
        self._ends[handle.slot] = (handle.generation, how)
        heapq.heappush(self._free_slots, handle.slot)
        if loan.kv.is_complete:
            self._regions.give_back(handle.offset)
        else:
            self._resting.append((loan.kv, now_seconds + self._config.quarantine_seconds))

    def _sweep(self, now_seconds: float) -> None:
        for loan in list(self._loans.values()):
            if loan.is_taken or loan.lease_until > now_seconds:
                continue
            arrived = loan.kv.num_arrived
            if arrived != loan.num_arrived:  # a long prompt is still being streamed, or was begun again
                loan.num_arrived = arrived
                loan.lease_until = now_seconds + self._config.staging_lease_seconds
            else:
                self._end(loan, "expired", now_seconds)
        resting = []
        for kv, until in self._resting:
            if kv.is_complete or until <= now_seconds:
                self._regions.give_back(kv.handle.offset)
            else:
                resting.append((kv, until))
        self._resting = resting

"""The slots of one node as memory: a `SlotPool` with its bytes, its lock and its clock."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from kvstore.errors import InvalidError, StoreError, UnavailableError
from kvstore.messages import MAX_PARTS
from kvstore.node.changes import Changes, News
from kvstore.node.slots import Block, ReserveOutcome, SlotPool
from kvstore.parts import num_parts, part_crcs
from kvstore.transfer import TransferError

_PAGE_NBYTES = 4096
_LINE_NBYTES = 64
GENERATION_NBYTES = 8


class SlotLayout(NamedTuple):
    """`[generations u64 [num_slots], padded to 4096 | slots, each padded to 64]`."""

    num_slots: int
    slot_nbytes: int

    @classmethod
    def fitting(cls, dram_nbytes: int, slot_nbytes: int) -> SlotLayout:
        """As many slots as `dram_nbytes` holds (the generations come on top).

        Raises InvalidError for none.
        """
        if slot_nbytes < 1 or dram_nbytes < _round_up(slot_nbytes, _LINE_NBYTES):
            raise InvalidError(f"{dram_nbytes} bytes of DRAM do not hold one slot of {slot_nbytes} bytes")
        return cls(dram_nbytes // _round_up(slot_nbytes, _LINE_NBYTES), slot_nbytes)

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return _round_up(self.slot_nbytes, _LINE_NBYTES)

    @property
    def header_nbytes(self) -> int:
        return _round_up(self.num_slots * GENERATION_NBYTES, _PAGE_NBYTES)

    @property
    def nbytes(self) -> int:
        return self.header_nbytes + self.num_slots * self.stride

    def offset(self, slot: int) -> int:
        """First byte of `slot`."""
        return self.header_nbytes + slot * self.stride

    def locate(self, offsets: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
        """Per range, int64 `[M]`, the slot in which it begins and where in that slot it ends.

        A slot that there is not for a range that begins outside of all slots.
        """
        slots, begins = np.divmod(offsets - self.header_nbytes, self.stride)
        return list(zip(slots.tolist(), (begins + lengths).tolist(), strict=True))


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


class SlotStore:
    """What in-process handles and the Node service both call; and the `WriteGuard` of its memory.

    Thread-safe; crcs are computed outside the lock. Every method but `admit` raises UnavailableError after
    `close`. What it loses and gains goes through `_evicted` and `_committed`, where a tier below hooks in.
    """

    def __init__(
        self,
        memory: np.ndarray,
        layout: SlotLayout,
        *,
        num_below: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`num_below`: how many objects a tier below may hold, to bound what is recorded of changes."""
        self.layout = layout
        self.changed = threading.Event()  # set when there is something to announce
        self.unchecked: SimpleQueue[Block | None] = SimpleQueue()  # committed without crcs; None: the end
        self.draining = False  # nothing new is taken; what is here can be read
        self._bytes = memory.data
        self._generations = memory[: layout.num_slots * GENERATION_NBYTES].view("<u8")
        self._generations[:] = 0
        self._pool = SlotPool(self._generations, layout.slot_nbytes)
        self._changes = Changes(limit=4 * (layout.num_slots + num_below) + 1024)
        self._clock = clock
        self._lock = threading.Lock()
        self.closed = False
        self._counters: Counter[str] = Counter()

    def reserve(
        self,
        keys: Sequence[bytes],
        nbytes: int,
        part_nbytes: int,
        lease_seconds: float | None,
        *,
        namespace: str = "",
        elsewhere: Container[bytes] = (),
        is_own: bool = False,
    ) -> tuple[int, ReserveOutcome]:
        """A new handle and, per key, a block to write; keys held `elsewhere` count as present.

        While the node drains, only its `is_own` business finds slots. Raises InvalidError for sizes out of
        range.
        """
        if nbytes < 1 or part_nbytes < 1 or num_parts(nbytes, part_nbytes) > MAX_PARTS:
            raise InvalidError(
                f"object of {nbytes} bytes in parts of {part_nbytes}: expected 1 to {MAX_PARTS} parts"
            )
        handle = secrets.randbits(62)
        with self._lock:
            now = self._begin()
            outcome = self._pool.reserve(
                handle,
                keys,
                nbytes,
                part_nbytes,
                *due(now, lease_seconds),
                namespace=namespace,
                elsewhere=elsewhere,
                is_full=self.draining and not is_own,
            )
            self._evicted(outcome.evicted)
        return handle, outcome

    def commit(self, handle: int, index: int, crcs: Sequence[int] | None, *, verify: bool) -> bool:
        """Make a block visible.

        Raises StaleError when its reservation is over, InvalidError for a wrong number of crcs or while a
        write into it is arriving.

        Without `crcs` they are computed afterwards (`unchecked`, `crcs`); with `verify` given ones are
        compared with the bytes that are there, and on a mismatch the block is aborted and the answer is False.
        """
        with self._lock:
            self._begin()
            block = self._pool.pending(handle, index)
            expected = num_parts(block.nbytes, block.part_nbytes)
            if crcs is not None and len(crcs) != expected:
                raise InvalidError(f"item {index}: {len(crcs)} crcs for an object of {expected} parts")
            self._pool.seal(block)
        given = None if crcs is None else tuple(crcs)
        is_torn = verify and part_crcs(self.view(block), block.part_nbytes) != given
        with self._lock:
            self._begin()
            if is_torn:
                self._pool.abort_one(handle, index)
                self._counters["corrupt"] += 1
                return False
            self._committed(self._pool.commit(handle, index, given))
        if given is None:
            self.unchecked.put(block)
        return True

    def abort(self, handle: int) -> bool:
        """Give up what is not committed. False if nothing was left."""
        with self._lock:
            self._begin()
            return self._pool.abort(handle)

    @contextmanager
    def admit(self, permit: int, offsets: np.ndarray, lengths: np.ndarray) -> Iterator[float]:
        """`WriteGuard.admit`: the permit is the handle of a reservation, which is good until it is over."""
        try:
            with self._lock:
                self._begin()
                blocks, expires = self._pool.begin_writes(permit, self.layout.locate(offsets, lengths))
        except StoreError as error:
            raise TransferError(f"the write is refused: {error}") from error
        try:
            yield expires
        finally:
            with self._lock:
                self._pool.end_writes(blocks)

    def lease(self, keys: Sequence[bytes], lease_seconds: float | None) -> tuple[int, list[Block | None]]:
        """A new handle and the blocks that are here; not evicted until `release`, or the time is over."""
        handle = secrets.randbits(62)
        with self._lock:
            now = self._begin()
            blocks = self._pool.lease(handle, keys, *due(now, lease_seconds))
            self._counters["missed"] += blocks.count(None)
            self._counters["hit"] += len(blocks) - blocks.count(None)
        return handle, blocks

    def waiting(self, keys: Sequence[bytes], blocks: Sequence[Block | None]) -> list[int]:
        """Of what `lease` did not give, the items that are here all the same: in a tier below."""
        return []

    def release(self, handle: int) -> bool:
        """End a lease; False if it is over already."""
        with self._lock:
            self._begin()
            return self._pool.release(handle)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is here and whole; neither pins nor refreshes it."""
        with self._lock:
            self._begin()
            return self._pool.exists(keys)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Make keys invisible now; False for those that are not here."""
        with self._lock:
            self._begin()
            removed = [self._pool.remove(key) for key in keys]
            self._record(removed=[key for key, gone in zip(keys, removed, strict=True) if gone])
        return removed

    def namespaces(self) -> dict[bytes, str]:
        """The namespace of every key that is here."""
        with self._lock:
            self._begin()
            return self._pool.namespaces()

    def drop_namespace(self, namespace: str) -> int:
        """Remove every object of a namespace; how many there were."""
        return sum(self.remove([key for key, its in self.namespaces().items() if its == namespace]))

    def check(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is here and its bytes match their crcs; damaged ones are removed and counted."""
        handle, blocks = self.lease(keys, None)
        try:
            known = [None if b is None else self.crcs(b) for b in blocks]
            intact = [
                b is not None and part_crcs(self.view(b), b.part_nbytes) == crcs
                for b, crcs in zip(blocks, known, strict=True)
            ]
        finally:
            self.release(handle)
        damaged = [
            block.key for block, ok in zip(blocks, intact, strict=True) if block is not None and not ok
        ]
        if damaged:
            with self._lock:
                self._counters["corrupt"] += len(damaged)
            self.remove(damaged)
        return intact

    def is_current(self, block: Block) -> bool:
        """Whether a committed block is here still."""
        return self._pool.find(block.key) is block

    def crcs(self, block: Block) -> tuple[int, ...]:
        """crc32 per part of a committed block that the caller leases; computed now unless they are known."""
        if block.crcs is None:
            block.crcs = part_crcs(self.view(block), block.part_nbytes)
        return block.crcs

    def view(self, block: Block) -> memoryview:
        """The bytes of a block, `[nbytes]`."""
        if self.closed:
            raise UnavailableError("this store node is closed")
        start = self.layout.offset(block.slot)
        return self._bytes[start : start + block.nbytes]

    def stats(self) -> dict[str, int]:
        """See `SlotPool.stats`; and blocks so far that were leased (`hit`), asked for in vain (`missed`), or
        had not their crcs (`corrupt`)."""
        with self._lock:
            self._begin()
            counted = {name: self._counters[name] for name in ("hit", "missed", "corrupt")}
            own = {"unannounced": len(self._changes), "is_draining": int(self.draining)}
            return {**self._pool.stats(), **counted, **own}

    def num_free(self) -> int:
        """Slots that hold nothing, and can be had."""
        with self._lock:
            self._begin()
            return 0 if self.draining else self._pool.num_free

    def snapshot_needed(self) -> bool:
        """Whether changes are not recorded, or were too many to record."""
        with self._lock:
            return self._changes.needed

    def restart_changes(self) -> None:
        """Everything held is new to the directory."""
        with self._lock:
            self._begin()
            self._changes.restart(self._pool.keys())
            self.changed.set()

    def take_changes(self, limit: int) -> News:
        """At most `limit` changes not yet announced; `changed` tells if more are left."""
        with self._lock:
            taken = self._changes.take(limit)
            if not self._changes:
                self.changed.clear()
            return taken

    def validate(self) -> None:
        """Raise AssertionError if the books do not balance."""
        with self._lock:
            self._pool.validate()

    def close(self) -> None:
        """Refuse everything from now on; all generations become odd, so that readers of the memory notice."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._generations |= np.uint64(1)
            self._generations = np.zeros(0, "<u8")
            self._bytes = memoryview(b"")

    def _begin(self) -> float:
        if self.closed:
            raise UnavailableError("this store node is closed")
        now = self._clock()
        self._pool.expire(now)
        return now

    def _committed(self, block: Block) -> None:
        """`block` can be read from now on. Called under the lock."""
        self._record(added=(block.key,))

    def _evicted(self, keys: Sequence[bytes]) -> None:
        """`keys` have lost their slots. Called under the lock."""
        self._record(removed=keys)

    def _record(
        self, *, added: Sequence[bytes] = (), on_ssd: Sequence[bytes] = (), removed: Sequence[bytes] = ()
    ) -> None:
        if added or on_ssd or removed:
            self._changes.record(added=added, on_ssd=on_ssd, removed=removed)
            self.changed.set()


def due(now: float, lease_seconds: float | None) -> tuple[float, ...]:
    """When something asked for now ends: a last argument of the pool's, or none."""
    return () if lease_seconds is None else (now + lease_seconds,)

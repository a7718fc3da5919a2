"""The state machine of a node's slots: reserve → commit → lease … release → evict.

Pure: no threads, no clock.

A slot is free, being written (reserved), committed, or draining: its reservation is over, but bytes that a
writer elsewhere sent under it are arriving at this moment, so the slot is free when that write has ended. A
write that comes later is not let in. A removed object that is still leased keeps its slot until the last lease
ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kvstore.errors import InvalidError, StaleError
from kvstore.messages import Refusal
from kvstore.node.eviction import LeastRecent, Stamp

_NEVER_USED = Stamp(0, 0)


@dataclass(slots=True, eq=False)
class Block:
    """One object in one slot, by the reservation `handle`."""

    key: bytes
    handle: int
    slot: int
    generation: int
    nbytes: int
    part_nbytes: int
    namespace: str = ""
    crcs: tuple[int, ...] | None = None  # None: not computed yet
    stamp: Stamp = _NEVER_USED
    num_writes: int = 0  # arriving from elsewhere
    sealed: bool = False  # about to be committed: no further write comes in
    num_leases: int = 0
    removed: bool = False


@dataclass(slots=True)
class _Writing:
    blocks: dict[int, Block]  # by position in the call; committed ones leave
    expires: float
    use: int = 0  # of its first commit; all its blocks then share one place in the LRU order


class ReserveOutcome(NamedTuple):
    """Per key a block to write, or why not; and what had to go."""

    blocks: list[Block | None]
    refusals: list[Refusal]
    evicted: list[bytes]


class SlotPool:
    """Slots of one size, each with a generation that is odd while the slot is (or was last) under write.

    `generations` (`[num_slots]` u64, zeros) is written, never read: readers in other processes look at it.
    Handles are the caller's, unique. Deadlines are times on the caller's clock; `expire(now)` applies them.
    """

    def __init__(self, generations: np.ndarray, slot_nbytes: int):
        self.num_slots = len(generations)
        self.slot_nbytes = slot_nbytes
        self.num_evicted = 0
        self._shared_generations = generations
        self._generations = [0] * self.num_slots
        self._free = deque(range(self.num_slots))
        self._draining: set[Block] = set()
        self._committed: dict[bytes, Block] = {}
        self._removed: set[Block] = set()  # still leased
        self._written: dict[bytes, Block] = {}  # under write, by key
        self._written_slots: dict[int, Block] = {}  # the same, by slot
        self._writings: dict[int, _Writing] = {}
        self._leases: dict[int, list[Block]] = {}
        self._order = LeastRecent()
        self._deadlines: list[tuple[float, Literal["writing", "lease"], int]] = []
        self._uses = 0

    def reserve(
        self,
        handle: int,
        keys: Sequence[bytes],
        nbytes: int,
        part_nbytes: int,
        expires: float = math.inf,
        *,
        namespace: str = "",
        elsewhere: Container[bytes] = (),
        is_full: bool = False,
    ) -> ReserveOutcome:
        """Take a slot for each key that is neither here nor under write, evicting the least recently used.

        A key that is here counts as used, one that is held `elsewhere` as present too. No key of this very
        call is evicted for a later one. With `is_full` there is a slot for none.
        """
        self._uses += 1
        outcome = ReserveOutcome([], [], [])
        writing = _Writing({}, expires)
        for index, key in enumerate(keys):
            block, refusal = None, self._refusal(key, nbytes, elsewhere)
            if refusal == "present":
                if key in self._committed:
                    self._touch(self._committed[key], Stamp(self._uses, -index))
            elif not refusal:
                slot = None if is_full else self._take_slot(outcome.evicted)
                if slot is None:
                    refusal = "no_room"
                else:
                    generation = self._next_generation(slot, odd=True)
                    block = Block(key, handle, slot, generation, nbytes, part_nbytes, namespace)
                    writing.blocks[index] = self._written[key] = self._written_slots[slot] = block
            outcome.blocks.append(block)
            outcome.refusals.append(refusal)
        if writing.blocks:
            self._writings[handle] = writing
            self._deadline(expires, "writing", handle)
        return outcome

    def pending(self, handle: int, index: int) -> Block:
        """The block under write.

        Raises StaleError when the reservation is over or that block is committed.
        """
        writing = self._writings.get(handle)
        if writing is None or index not in writing.blocks:
            raise StaleError(
                f"item {index} of reservation {handle:x} is not under write (committed, aborted or expired)"
            )
        return writing.blocks[index]

    def begin_writes(self, handle: int, writes: Sequence[tuple[int, int]]) -> tuple[list[Block], float]:
        """Let bytes of another process in: per write a slot, and where in it they end.

        Gives the blocks, for `end_writes`, and the time by which the bytes must be there. Raises StaleError,
        and lets nothing in, unless every slot is under write by this reservation; InvalidError for bytes
        beyond the object.
        """
        writing = self._writings.get(handle)
        if writing is None:
            raise StaleError(f"reservation {handle:x} is over (committed, aborted or expired), or never was")
        blocks = []
        for slot, end in writes:
            block = self._written_slots.get(slot)
            if block is None or block.handle != handle or block.sealed:
                raise StaleError(f"slot {slot} is not under write by reservation {handle:x}")
            if end > block.nbytes:
                raise InvalidError(f"a write that ends at {end} of an object of {block.nbytes} bytes")
            blocks.append(block)
        for block in blocks:
            block.num_writes += 1
        return blocks, writing.expires

    def end_writes(self, blocks: Sequence[Block]) -> None:
        """What `begin_writes` let in has ended: none of it moves any more."""
        for block in blocks:
            block.num_writes -= 1
            if not block.num_writes and block in self._draining:
                self._draining.remove(block)
                self._free.append(block.slot)

    def seal(self, block: Block) -> None:
        """From now on no write into this block begins: its bytes can be verified, then comes `commit`.

        Raises InvalidError while a write is arriving, StaleError if it is sealed already.
        """
        if block.sealed:
            raise StaleError(f"slot {block.slot} is being committed by another call")
        if block.num_writes:
            raise InvalidError(
                f"{block.num_writes} writes into slot {block.slot} are arriving: commit when they are done"
            )
        block.sealed = True

    def commit(self, handle: int, index: int, crcs: tuple[int, ...] | None) -> Block:
        """The block is written, and sealed: visible from now on, and just used.

        Raises StaleError as `pending` does.
        """
        block = self.pending(handle, index)
        writing = self._writings[handle]
        if not writing.use:
            self._uses += 1
            writing.use = self._uses
        del writing.blocks[index], self._written[block.key], self._written_slots[block.slot]
        if not writing.blocks:
            del self._writings[handle]
        block.crcs = crcs
        block.generation = self._next_generation(block.slot, odd=False)
        self._committed[block.key] = block
        self._touch(block, Stamp(writing.use, -index))
        return block

    def abort(self, handle: int) -> bool:
        """Give up what is not committed. False if nothing was left."""
        writing = self._writings.pop(handle, None)
        if writing is None:
            return False
        for block in writing.blocks.values():
            self._drop_writing(block)
        return True

    def abort_one(self, handle: int, index: int) -> None:
        """Give up one block of a reservation. Raises StaleError as `pending` does."""
        block = self.pending(handle, index)
        writing = self._writings[handle]
        del writing.blocks[index]
        if not writing.blocks:
            del self._writings[handle]
        self._drop_writing(block)

    def lease(
        self, handle: int, keys: Sequence[bytes], expires: float = math.inf, *, is_use: bool = True
    ) -> list[Block | None]:
        """The blocks that are here (None for others), not evicted until the lease ends, and just used.

        Without `is_use` they keep their places in the LRU order.
        """
        self._uses += is_use
        held = [self._committed.get(key) for key in keys]
        for index, block in enumerate(held):
            if block is not None:
                block.num_leases += 1
                self._touch(block, Stamp(self._uses, -index) if is_use else block.stamp)
        leased = [block for block in held if block is not None]
        if leased:
            self._leases[handle] = leased
            self._deadline(expires, "lease", handle)
        return held

    def release(self, handle: int) -> bool:
        """End a lease. False if it is over already."""
        blocks = self._leases.pop(handle, None)
        if blocks is None:
            return False
        for block in blocks:
            block.num_leases -= 1
            if block.num_leases:
                continue
            if block.removed:
                self._removed.discard(block)
                self._free.append(block.slot)
            else:
                self._order.put(block.key, block.stamp)
        return True

    def find(self, key: bytes) -> Block | None:
        """The committed block of a key; not a use."""
        return self._committed.get(key)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is here and whole. Not a use: asking neither pins nor refreshes."""
        return [key in self._committed for key in keys]

    def remove(self, key: bytes) -> bool:
        """Make a committed key invisible now; its slot is free once nobody leases it.

        False if it is not here.
        """
        block = self._committed.pop(key, None)
        if block is None:
            return False
        self._order.discard(key)
        if block.num_leases:
            block.removed = True
            self._removed.add(block)
        else:
            self._free.append(block.slot)
        return True

    def expire(self, now: float) -> None:
        """End the reservations and leases whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, kind, which = heapq.heappop(self._deadlines)
            if kind == "writing":
                self.abort(which)
            else:
                self.release(which)

    def is_unchanged(self, block: Block) -> bool:
        """Whether the slot still has the bytes of this committed block, though it may be evicted."""
        return self._generations[block.slot] == block.generation

    @property
    def num_free(self) -> int:
        return len(self._free)

    def keys(self) -> list[bytes]:
        """Every visible key."""
        return list(self._committed)

    def namespaces(self) -> dict[bytes, str]:
        """The namespace of every visible key."""
        return {key: block.namespace for key, block in self._committed.items()}

    def stats(self) -> dict[str, int]:
        """Slots by state (free, reserved, draining, committed, removed; `slots` in all), leases, evictions."""
        return {
            "slots": self.num_slots,
            "free": len(self._free),
            "reserved": len(self._written),
            "draining": len(self._draining),
            "committed": len(self._committed),
            "removed": len(self._removed),
            "leased": len(self._committed) - len(self._order) + len(self._removed),
            "leases": len(self._leases),
            "evicted": self.num_evicted,
        }

    def validate(self) -> None:
        """Raise AssertionError if the books do not balance."""
        written = [block for writing in self._writings.values() for block in writing.blocks.values()]
        slots = [
            *self._free,
            *(b.slot for b in (*written, *self._draining, *self._committed.values(), *self._removed)),
        ]
        leases: dict[Block, int] = {}
        for block in (block for blocks in self._leases.values() for block in blocks):
            leases[block] = leases.get(block, 0) + 1
        evictable = {key: block.stamp for key, block in self._committed.items() if not block.num_leases}
        checks = {
            "every slot is in exactly one state": sorted(slots) == list(range(self.num_slots)),
            "what is under write belongs to a reservation": {id(b) for b in written}
            == {id(b) for b in self._written.values()}
            == {id(b) for b in self._written_slots.values()},
            "blocks under write are found by key, slot and reservation": all(
                self._written[b.key] is self._written_slots[b.slot] is b
                and b in self._writings[b.handle].blocks.values()
                for b in written
            ),
            "slots drain while a write into them is arriving": all(b.num_writes > 0 for b in self._draining),
            "nobody writes into what can be read": not any(
                b.num_writes for b in (*self._committed.values(), *self._removed)
            ),
            "no key is both under write and committed": not self._written.keys() & self._committed.keys(),
            "lease counts match": all(
                b.num_leases == leases.get(b, 0) for b in (*self._committed.values(), *leases)
            ),
            "removed blocks are leased": all(b.removed and b.num_leases for b in self._removed),
            "LRU order holds exactly what is not in use": self._order.stamps() == evictable,
            "slots under write are odd": all(
                self._generations[b.slot] % 2 for b in (*written, *self._draining)
            ),
            "committed slots keep their generation": all(
                b.generation % 2 == 0 and self._generations[b.slot] == b.generation
                for b in (*self._committed.values(), *self._removed)
            ),
        }
        failed = [claim for claim, holds in checks.items() if not holds]
        if failed:
            raise AssertionError(f"slot pool: not true: {'; '.join(failed)}")

    def _refusal(self, key: bytes, nbytes: int, elsewhere: Container[bytes]) -> Refusal:
        if nbytes > self.slot_nbytes:
            return "too_large"
        if key in self._committed or key in elsewhere:
            return "present"
        return "writing" if key in self._written else ""

    def _take_slot(self, evicted: list[bytes]) -> int | None:
        if self._free:
            return self._free.popleft()
        oldest = self._order.oldest()
        if oldest is None or oldest[0].use == self._uses:
            return None
        block = self._committed.pop(oldest[1])
        self._order.discard(block.key)
        self.num_evicted += 1
        evicted.append(block.key)
        return block.slot

    def _touch(self, block: Block, stamp: Stamp) -> None:
        block.stamp = stamp
        if block.num_leases:
            self._order.discard(block.key)
        else:
            self._order.put(block.key, stamp)

    def _next_generation(self, slot: int, *, odd: bool) -> int:
        generation = self._generations[slot] + 1
        generation += (generation % 2) != odd
        self._generations[slot] = generation
        self._shared_generations[slot] = generation
        return generation

    def _drop_writing(self, block: Block) -> None:
        del self._written[block.key], self._written_slots[block.slot]
        if block.num_writes:
            self._draining.add(block)
        else:
            self._free.append(block.slot)

    def _deadline(self, due: float, kind: Literal["writing", "lease"], which: int) -> None:
        if due < math.inf:
            heapq.heappush(self._deadlines, (due, kind, which))

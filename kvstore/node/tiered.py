"""DRAM slots with an SSD tier below them: what is spilled, and what comes back when it is used."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Container, Sequence

import numpy as np

from kvstore.node.slots import Block, ReserveOutcome
from kvstore.node.ssd import SsdTier
from kvstore.node.ssd.tier import Staged
from kvstore.node.store import SlotLayout, SlotStore

_REMOTE_PROMOTE_SECONDS = 1.0  # of one lease call from elsewhere, which has about two


class TieredStore(SlotStore):
    """A `SlotStore` whose objects are also written to SSD, in the background, before they are evicted.

    Once more than half of the slots hold something, every committed object is written, the oldest first: so
    an eviction finds its victim on SSD already, and no put waits for the disk. (What is evicted before its
    turn is lost, and counted as `ssd_skipped`.) A lease brings objects back into DRAM first. Objects are
    announced as "dram" when they are in both.
    """

    def __init__(self, memory: np.ndarray, layout: SlotLayout, ssd: SsdTier):
        super().__init__(memory, layout, num_below=ssd.num_slots)
        self.spillable = threading.Event()  # set when `begin_spill` may have something
        self._ssd = ssd
        self._unspilled: dict[bytes, None] = {}  # in DRAM, and not on SSD, in the order of their commits
        self._spilling: dict[bytes, Block] = {}  # being written to SSD
        self._arriving: dict[bytes, threading.Event] = {}  # on their way from SSD to DRAM
        self._arrivals = threading.Lock()

    def reserve(
        self,
        keys: Sequence[bytes],
        nbytes: int,
        part_nbytes: int,
        lease_seconds: float | None,
        *,
        namespace: str = "",
        elsewhere: Container[bytes] | None = None,
        is_own: bool = False,
    ) -> tuple[int, ReserveOutcome]:
        """What is on SSD is present."""
        elsewhere = self._ssd if elsewhere is None else elsewhere
        handle, outcome = super().reserve(
            keys,
            nbytes,
            part_nbytes,
            lease_seconds,
            namespace=namespace,
            elsewhere=elsewhere,
            is_own=is_own,
        )
        present = [key for key, why in zip(keys, outcome.refusals, strict=True) if why == "present"]
        if present:
            self._ssd.touch(present)
        return handle, outcome

    def lease(self, keys: Sequence[bytes], lease_seconds: float | None) -> tuple[int, list[Block | None]]:
        """Objects on SSD are read into DRAM before. Those for which there is no slot or, for callers
        elsewhere, no time, are answered as not here."""
        handles: list[int] = []
        try:
            if any(key in self._ssd for key in keys):
                handles.append(self._hold(keys))
                limit = math.inf if lease_seconds is None else min(_REMOTE_PROMOTE_SECONDS, lease_seconds / 4)
                self._promote(keys, self._clock() + limit, handles)
            handle, blocks = super().lease(keys, lease_seconds)
        finally:
            for held in handles:
                self._give_up(held)
        used = [block.key for block in blocks if block is not None and block.key in self._ssd]
        if used:
            self._ssd.touch(used)
        return handle, blocks

    def waiting(self, keys: Sequence[bytes], blocks: Sequence[Block | None]) -> list[int]:
        """Those on SSD for which there was no slot or no time."""
        items = enumerate(zip(keys, blocks, strict=True))
        return [index for index, (key, block) in items if block is None and key in self._ssd]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """In either tier."""
        return [here or key in self._ssd for here, key in zip(super().exists(keys), keys, strict=True)]

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """From both tiers."""
        with self._lock:
            self._begin()
            removed = [self._pool.remove(key) | self._ssd.drop(key) for key in keys]
            gone = [key for key, was in zip(keys, removed, strict=True) if was]
            for key in gone:
                self._unspilled.pop(key, None)
            for key in keys:
                self._spilling.pop(key, None)
            self._record(removed=gone)
            self._settle()
        return removed

    def namespaces(self) -> dict[bytes, str]:
        """In both tiers."""
        return {**self._ssd.namespaces(), **super().namespaces()}

    def begin_spill(self, limit: int, *, everything: bool = False) -> list[Block]:
        """At most `limit` objects to write to SSD, the oldest first; tell `end_spill` what became of them.

        They are not held: after a block's bytes were written, `is_unchanged` tells whether they are its own.
        None while more than half of the slots are free, unless `everything` is asked for; none while the
        disk takes nothing.
        """
        with self._lock:
            self._begin()
            if not self._ssd.accepts or not (everything or self._is_filling()):
                return []
            found = (self._pool.find(key) for key, _ in zip(self._unspilled, range(limit), strict=False))
            blocks = [block for block in found if block is not None]
            self._spilling = {block.key: block for block in blocks}
        return blocks

    def is_unchanged(self, block: Block) -> bool:
        """Whether the slot of a committed block has its bytes, and not already another's."""
        return self._pool.is_unchanged(block)

    def end_spill(self, written: Sequence[tuple[Block, Staged | None]]) -> None:
        """Each block of `begin_spill`, and where its bytes are whole; None: nowhere."""
        with self._lock:
            for block, staged in written:
                current = self._pool.find(block.key)
                wanted = self._spilling.get(block.key) is block and current in (block, None)
                if staged is not None and wanted:
                    self._ssd.publish([staged])
                    if block.key in self._ssd:
                        self._unspilled.pop(block.key, None)
                        self._record(on_ssd=[] if current else [block.key])
                        continue
                elif staged is not None:
                    self._ssd.discard([staged])
                self._counters["skipped"] += current is None
            self._spilling = {}
            self._settle()

    def num_unspilled(self) -> int:
        """Objects that are in DRAM only."""
        return len(self._unspilled)

    def restart_changes(self) -> None:
        """Everything held is new to the directory."""
        with self._lock:
            self._begin()
            in_dram = self._pool.keys()
            self._changes.restart(in_dram, set(self._ssd.keys()).difference(in_dram))
            self.changed.set()

    def stats(self) -> dict[str, int]:
        """With those of the tier below; `ssd_skipped` objects were evicted before they could be written."""
        skipped = {"ssd_skipped": self._counters["skipped"], "ssd_unspilled": len(self._unspilled)}
        return {**super().stats(), **self._ssd.stats(), **skipped}

    def validate(self) -> None:
        """Raise AssertionError if the books do not balance."""
        super().validate()
        self._ssd.validate()
        with self._lock:
            if not all(self._pool.exists(list(self._unspilled))):
                raise AssertionError("an object waits to be written to SSD that is not in DRAM")

    def _committed(self, block: Block) -> None:
        super()._committed(block)
        self._await_spill(block.key)

    def _evicted(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._unspilled:
                del self._unspilled[key]
                self._counters["skipped"] += key not in self._spilling
        fallen = [key for key in keys if key in self._ssd]
        self._record(on_ssd=fallen, removed=[key for key in keys if key not in self._ssd])

    def _await_spill(self, key: bytes) -> None:
        self._unspilled[key] = None
        if self._is_filling():
            self.spillable.set()

    def _is_filling(self) -> bool:
        return 2 * self._pool.num_free < self._pool.num_slots

    def _settle(self) -> None:
        """Take note of what the tier below lost by itself. Called under the lock."""
        gone = [key for key in self._ssd.take_gone() if key not in self._ssd]
        here = self._pool.exists(gone)
        self._record(removed=[key for key, in_dram in zip(gone, here, strict=True) if not in_dram])
        if self._ssd.num_slots > self._pool.num_slots:  # else they would drive each other out for ever
            for key, in_dram in zip(gone, here, strict=True):
                if in_dram:
                    self._await_spill(key)

    def _hold(self, keys: Sequence[bytes]) -> int:
        """Keep what is in DRAM from eviction, without using it; the handle to give up."""
        handle = secrets.randbits(62)
        with self._lock:
            self._begin()
            self._pool.lease(handle, keys, is_use=False)
        return handle

    def _give_up(self, handle: int) -> None:
        with self._lock:
            self._pool.release(handle)

    def _promote(self, keys: Sequence[bytes], deadline: float, handles: list[int]) -> None:
        """Bring those of `keys` that are on SSD only into DRAM, and add to `handles` what holds them there.

        One of them however late it is, so that who asks again gets on.
        """
        wanted = [
            key for key, here in zip(keys, super().exists(keys), strict=True) if not here and key in self._ssd
        ]
        for number, key in enumerate(dict.fromkeys(wanted)):
            if number and self._clock() >= deadline:
                return
            handle = self._promote_one(key, deadline)
            if handle is not None:
                handles.append(handle)

    def _promote_one(self, key: bytes, deadline: float) -> int | None:
        with self._arrivals:
            mine = threading.Event()
            arriving = self._arriving.setdefault(key, mine)
        if arriving is not mine:
            arriving.wait(min(deadline - self._clock(), threading.TIMEOUT_MAX))
            return self._hold([key])
        try:
            return self._read_in(key)
        finally:
            with self._arrivals:
                del self._arriving[key]
            mine.set()

    def _read_in(self, key: bytes) -> int | None:
        put = self._ssd.describe(key)
        if put is None:
            return None
        handle, outcome = self.reserve(
            [key], put.nbytes, put.part_nbytes, None, namespace=put.namespace, elsewhere=(), is_own=True
        )
        block = outcome.blocks[0]
        if block is None:  # no slot for it now; or it has come meanwhile
            return self._hold([key])
        try:
            intact = self._ssd.read(put, self.view(block))
            with self._lock:
                self._begin()
                self._settle()
                if not intact or key not in self._ssd:
                    return None
                self._record(added=(self._pool.commit(handle, 0, put.crcs).key,))
                held = secrets.randbits(62)
                self._pool.lease(held, [key], is_use=False)
                return held
        finally:
            with self._lock:
                self._pool.abort(handle)

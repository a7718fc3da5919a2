"""What the prefill instances hold: the store's prefix index and eviction, with the blocks on their way.

Blocks count for their instance from the placement on, and as a source for others when they are computed, as the
Conductor counts them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Literal, Protocol

import numpy as np

from kvstore.directory.index import PrefixIndex
from kvstore.node.eviction import LeastRecent

EvictionName = Literal["lru", "random"]
_NUM_MASKS = 16_384  # sets of nodes whose numbers are kept


class EvictionOrder(Protocol):
    """Who goes next."""

    def __len__(self) -> int: ...

    def put_chain(self, keys: Sequence[int], use: int) -> None: ...

    def discard(self, key: int) -> None: ...

    def pop_oldest(self, count: int) -> list[int]: ...


class RandomOrder:
    """Any block goes next: what LRU is worth, one learns from this."""

    def __init__(self, seed: int) -> None:
        self._keys: list[int] = []
        self._places: dict[int, int] = {}
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._keys)

    def put_chain(self, keys: Sequence[int], use: int) -> None:
        for key in keys:
            if key not in self._places:
                self._places[key] = len(self._keys)
                self._keys.append(key)

    def discard(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is None:
            return
        last = self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._places[last] = place

    def pop_oldest(self, count: int) -> list[int]:
        victims = self._random.sample(self._keys, min(count, len(self._keys)))
        for key in victims:
            self.discard(key)
        return victims


def eviction_order(name: EvictionName, seed: int) -> EvictionOrder:
    return LeastRecent() if name == "lru" else RandomOrder(seed)


class Caches:
    """DRAM and SSD of `num_nodes` home nodes; nodes are numbers, blocks are the trace's ids."""

    def __init__(
        self,
        num_nodes: int,
        dram_blocks: int,
        ssd_blocks: int = 0,
        eviction: EvictionName = "lru",
        seed: int = 0,
    ):
        self.index: PrefixIndex[int] = PrefixIndex()
        self._names = [f"p{node}" for node in range(num_nodes)]
        for name in self._names:
            self.index.bit(name)  # a node's bit is its number
        self._dram_blocks, self._ssd_blocks = dram_blocks, ssd_blocks
        self._dram = [eviction_order(eviction, seed + node) for node in range(num_nodes)]
        self._ssd: list[LeastRecent[int]] = [LeastRecent() for _ in range(num_nodes)]
        self._on_ssd: list[set[int]] = [set() for _ in range(num_nodes)]
        self._pending: list[set[int]] = [set() for _ in range(num_nodes)]
        self._nothing = np.zeros(num_nodes, np.int64)
        self._nothing.flags.writeable = False
        self._nodes = lru_cache(_NUM_MASKS)(partial(_nodes, -(-num_nodes // 8)))
        self._uses = 0

    def match(self, keys: Sequence[int], draw: float) -> tuple[np.ndarray, int, int]:
        """FindBestPrefixMatch: leading blocks per node `[P]`, the most that can be fetched, and from whom.

        Among equal holders `draw` in [0, 1) decides.
        """
        runs = self.index.runs(keys)
        if not runs:
            return self._nothing, 0, -1
        local = self._nothing.copy()
        best, holder = 0, -1
        for length, mask in runs:
            local[self._nodes(mask)] = length
        for length, mask in reversed(runs):
            if length <= best:
                break
            nodes = self._nodes(mask)
            first = int(draw * len(nodes))
            for turn in range(len(nodes)):
                node = nodes.item(first - turn)
                available = self._computed(node, keys, length)
                if available > best:
                    best, holder = available, node
                    if best == length:
                        break
        return local, best, holder

    def use(self, node: int, keys: Sequence[int], num_held: int) -> int:
        """`node` will hold `keys`, of which the first `num_held` are there: they were used now.

        The others are pending until `computed`. Returns how many blocks have to come from its SSD.
        """
        if not keys:
            return 0
        self._uses += 1
        dram, pending = self._dram[node], self._pending[node]
        new = keys[num_held:]
        if new:
            self.index.add(self._names[node], new)
            pending.update(new)
        num_read = self._promote(node, keys) if self._on_ssd[node] else 0
        dram.put_chain(keys, self._uses)
        over = len(dram) - self._dram_blocks
        if over > 0:
            victims = dram.pop_oldest(over)
            if self._ssd_blocks:
                victims = self._demote(node, victims)
            self.index.remove(self._names[node], victims)
            if pending:
                pending.difference_update(victims)
        return num_read

    def computed(self, node: int, keys: Sequence[int]) -> None:
        """`keys` are there: others may fetch them."""
        if pending := self._pending[node]:
            pending.difference_update(keys)

    def forget(self, node: int) -> None:
        """`node` is gone, with all it held."""
        self.index.forget(self._names[node])
        for order in (self._dram[node], self._ssd[node]):
            order.pop_oldest(len(order))
        self._on_ssd[node].clear()
        self._pending[node].clear()

    def contents(self) -> list[set[int]]:
        """The blocks of each node (copies)."""
        return [self.index.keys(name) for name in self._names]

    def _computed(self, node: int, keys: Sequence[int], length: int) -> int:
        pending = self._pending[node]
        if not pending or pending.isdisjoint(keys[:length]):
            return length
        return next(index for index, key in enumerate(keys) if key in pending)

    def _promote(self, node: int, keys: Sequence[int]) -> int:
        read = self._on_ssd[node].intersection(keys)
        for key in read:
            self._ssd[node].discard(key)
        self._on_ssd[node] -= read
        return len(read)

    def _demote(self, node: int, victims: Sequence[int]) -> list[int]:
        # to SSD, deepest block first; returns what had to leave it
        ssd = self._ssd[node]
        ssd.put_chain(victims[::-1], self._uses)
        self._on_ssd[node].update(victims)
        gone = ssd.pop_oldest(max(len(ssd) - self._ssd_blocks, 0))
        self._on_ssd[node].difference_update(gone)
        return gone


def _nodes(mask_nbytes: int, mask: int) -> np.ndarray:
    raw = np.frombuffer(mask.to_bytes(mask_nbytes, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little").nonzero()[0]


def lru_hit_rate(chains: Sequence[Sequence[int]], num_tokens: Sequence[int], capacity: int, Z: int) -> float:
    """Share of all tokens that one LRU cache of `capacity` blocks of `Z` tokens serves, request by request."""
    cache: LeastRecent[int] = LeastRecent()
    held: set[int] = set()
    hits = 0
    for use, (keys, num) in enumerate(zip(chains, num_tokens, strict=True)):
        length = next((index for index, key in enumerate(keys) if key not in held), len(keys))
        hits += min(length * Z, num - 1)
        cache.put_chain(keys, use)
        held.update(keys)
        if len(cache) > capacity:
            held.difference_update(cache.pop_oldest(len(cache) - capacity))
    return hits / sum(num_tokens)

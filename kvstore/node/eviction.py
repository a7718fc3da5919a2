"""LRU unless in use: which key to give up next. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import repeat
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Stamp(NamedTuple):
    """When a key was last used: the number of the call, then its position in it, negated.

    Within one call the deepest block counts as the oldest, since a prefix is only worth something from its
    start.
    """

    use: int
    height: int


_NEVER = Stamp(-1, 0)


class LeastRecent(Generic[Key]):
    """The keys that may be evicted, oldest stamp first. Keys in use are not in here.

    Stamps that come in order are kept in a linked list, O(1) each; the others (of blocks that are released
    long after their use) in a heap with lazy deletion, O(log n) on average.
    """

    def __init__(self) -> None:
        self._in_order: OrderedDict[Key, Stamp] = OrderedDict()
        self._newest = _NEVER
        self._late: dict[Key, Stamp] = {}
        self._heap: list[tuple[Stamp, Key]] = []

    def __len__(self) -> int:
        return len(self._in_order) + len(self._late)

    def put(self, key: Key, stamp: Stamp) -> None:
        """`key` may be evicted, in its turn; a second call gives it a new turn."""
        if stamp > self._newest:
            self._newest = stamp
            self._late.pop(key, None)
            self._in_order[key] = stamp
            self._in_order.move_to_end(key)
            return
        self._in_order.pop(key, None)
        self._late[key] = stamp
        heapq.heappush(self._heap, (stamp, key))
        if len(self._heap) > 2 * len(self._late) + 64:
            self._heap = [(stamp, key) for key, stamp in self._late.items()]
            heapq.heapify(self._heap)

    def put_chain(self, keys: Sequence[Key], use: int) -> None:
        """`put` every key of call `use`, which is later than all before, with the stamp of its position."""
        in_order = self._in_order
        for key in keys:
            in_order.pop(key, None)
        if self._late:
            for key in keys:
                self._late.pop(key, None)
        in_order.update(zip(reversed(keys), map(Stamp, repeat(use), range(1 - len(keys), 1)), strict=True))
        self._newest = Stamp(use, 0)

    def discard(self, key: Key) -> None:
        """`key` is in use or gone."""
        self._in_order.pop(key, None)
        self._late.pop(key, None)

    def oldest(self) -> tuple[Stamp, Key] | None:
        """The next victim, which stays until discarded; None when every key is in use."""
        late = self._oldest_late()
        if not self._in_order:
            return late
        key, stamp = next(iter(self._in_order.items()))
        return late if late is not None and late[0] < stamp else (stamp, key)

    def pop_oldest(self, count: int) -> list[Key]:
        """Discard the next `count` victims (or all there are), oldest first."""
        if not self._late:
            pop = self._in_order.popitem
            return [pop(last=False)[0] for _ in range(min(count, len(self._in_order)))]
        victims = []
        while len(victims) < count and (oldest := self.oldest()) is not None:
            victims.append(oldest[1])
            self.discard(oldest[1])
        return victims

    def stamps(self) -> dict[Key, Stamp]:
        """Every evictable key with its stamp (a copy)."""
        return {**self._in_order, **self._late}

    def _oldest_late(self) -> tuple[Stamp, Key] | None:
        while self._heap:
            stamp, key = self._heap[0]
            if self._late.get(key) == stamp:
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

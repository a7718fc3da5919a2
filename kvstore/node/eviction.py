"""LRU unless in use: which key to give up next. Pure."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Stamp(NamedTuple):
    """When a key was last used: the number of the call, then its position in it, negated.

    Within one call the deepest block counts as the oldest, since a prefix is only worth something from its
    start.
    """

    use: int
    height: int


class LeastRecent:
    """The keys that may be evicted, oldest stamp first. Keys in use are not in here.

    A heap with lazy deletion: `put`, `discard` and `oldest` cost O(log n) on average.
    """

    def __init__(self) -> None:
        self._stamps: dict[bytes, Stamp] = {}
        self._heap: list[tuple[Stamp, bytes]] = []

    def __len__(self) -> int:
        return len(self._stamps)

    def put(self, key: bytes, stamp: Stamp) -> None:
        """`key` may be evicted, in its turn; a second call gives it a new turn."""
        self._stamps[key] = stamp
        heapq.heappush(self._heap, (stamp, key))
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [(stamp, key) for key, stamp in self._stamps.items()]
            heapq.heapify(self._heap)

    def discard(self, key: bytes) -> None:
        """`key` is in use or gone."""
        self._stamps.pop(key, None)

    def oldest(self) -> tuple[Stamp, bytes] | None:
        """The next victim, which stays until discarded; None when every key is in use."""
        while self._heap:
            stamp, key = self._heap[0]
            if self._stamps.get(key) == stamp:
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def stamps(self) -> dict[bytes, Stamp]:
        """Every evictable key with its stamp (a copy)."""
        return dict(self._stamps)

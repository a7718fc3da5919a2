"""LRU unless in use: which key to give up next. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Stamp(NamedTuple):
    """When a key was last used: the number of the call, then its position in it, negated.

    Within one call the deepest block counts as the oldest, since a prefix is only worth something from its
    start.
    """

    use: int
    height: int


class LeastRecent(Generic[Key]):
    """The keys that may be evicted, oldest stamp first. Keys in use are not in here.

    Single keys come with any stamp and are kept in a heap, O(log n) on average; whole calls come in order and are
    kept in a queue of calls, O(1) per key. Both delete lazily: what was used again is passed over.
    """

    def __init__(self) -> None:
        self._stamps: dict[Key, Stamp] = {}  # of keys in the heap
        self._heap: list[tuple[Stamp, Key]] = []
        self._uses: dict[Key, int] = {}  # of keys in the queue
        self._calls: deque[tuple[int, Sequence[Key]]] = deque()
        self._oldest_left = -1  # keys of the oldest call that were not passed over; -1: all of them
        self._num_queued, self._shorten_at = 0, 1024

    def __len__(self) -> int:
        return len(self._stamps) + len(self._uses)

    def put(self, key: Key, stamp: Stamp) -> None:
        """`key` may be evicted, in its turn; a second call gives it a new turn."""
        self._uses.pop(key, None)
        self._stamps[key] = stamp
        heapq.heappush(self._heap, (stamp, key))
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [(stamp, key) for key, stamp in self._stamps.items()]
            heapq.heapify(self._heap)

    def put_chain(self, keys: Sequence[Key], use: int) -> None:
        """`put` all `keys` of call `use` with the stamps of their positions.

        `use` is greater than in every `put_chain` before. `keys` are distinct, and kept: leave them as they are.
        """
        self._uses.update(dict.fromkeys(keys, use))
        if self._stamps:
            for key in keys:
                self._stamps.pop(key, None)
        self._calls.append((use, keys))
        self._num_queued += len(keys)
        if self._num_queued > self._shorten_at:
            self._shorten()

    def discard(self, key: Key) -> None:
        """`key` is in use or gone."""
        self._uses.pop(key, None)
        self._stamps.pop(key, None)

    def oldest(self) -> tuple[Stamp, Key] | None:
        """The next victim, which stays until discarded; None when every key is in use."""
        single, called = self._oldest_single(), self._oldest_called()
        if single is None or called is None:
            return single or called
        return min(single, called, key=lambda entry: entry[0])

    def pop_oldest(self, count: int) -> list[Key]:
        """Discard the next `count` victims (or all there are), oldest first."""
        if not self._stamps:
            return self._pop_called(count)
        victims: list[Key] = []
        while len(victims) < count and (oldest := self.oldest()) is not None:
            victims.append(oldest[1])
            self.discard(oldest[1])
        return victims

    def stamps(self) -> dict[Key, Stamp]:
        """Every evictable key with its stamp (a copy)."""
        stamps = dict(self._stamps)
        for use, keys in self._calls:
            for index, key in enumerate(keys):
                if self._uses.get(key) == use:
                    stamps[key] = Stamp(use, -index)
        return stamps

    def _oldest_single(self) -> tuple[Stamp, Key] | None:
        while self._heap:
            stamp, key = self._heap[0]
            if self._stamps.get(key) == stamp:
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def _oldest_called(self) -> tuple[Stamp, Key] | None:
        while self._calls:
            use, keys = self._calls[0]
            left = len(keys) if self._oldest_left < 0 else self._oldest_left
            while left:
                key = keys[left - 1]
                if self._uses.get(key) == use:
                    self._oldest_left = left
                    return Stamp(use, 1 - left), key
                left -= 1
            self._next_call()
        return None

    def _pop_called(self, count: int) -> list[Key]:
        uses, victims, missing = self._uses, [], count
        get = uses.get
        while self._calls and missing > 0:
            use, keys = self._calls[0]
            left = len(keys) if self._oldest_left < 0 else self._oldest_left
            while left and missing:
                left -= 1
                key = keys[left]
                if get(key) == use:
                    del uses[key]
                    victims.append(key)
                    missing -= 1
            self._oldest_left = left
            if not left:
                self._next_call()
        return victims

    def _next_call(self) -> None:
        self._num_queued -= len(self._calls.popleft()[1])
        self._oldest_left = -1

    def _shorten(self) -> None:
        # forget the calls whose keys were all used again, but the oldest, which is being passed over
        uses, oldest = self._uses, self._calls.popleft()
        calls = [call for call in self._calls if any(uses.get(key) == call[0] for key in call[1])]
        self._calls = deque([oldest, *calls])
        self._num_queued = sum(len(keys) for _, keys in self._calls)
        self._shorten_at = 2 * self._num_queued + 1024

"""SIEVE, the eviction order of a pool: pure (Zhang et al., NSDI '24; the paper's endpoint pool uses it).

Objects stand in a queue, oldest first. A use only marks an object. A hand goes from the oldest to the newest and
round again: a marked object loses its mark and stays where it is, the first that has none is evicted, and the
hand rests on the one behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Node(Generic[K]):
    __slots__ = ("is_marked", "key", "newer", "older")

    def __init__(self, key: K, older: _Node[K] | None):
        self.key, self.older = key, older
        self.newer: _Node[K] | None = None
        self.is_marked = False


class Sieve(Generic[K]):
    """Keys in the order of their arrival, their marks, and the hand. Adding, using and removing are O(1)."""

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._oldest: _Node[K] | None = None
        self._newest: _Node[K] | None = None
        self._hand: _Node[K] | None = None  # None: the next search begins with the oldest

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[K]:
        """In no order that matters."""
        return iter(self._nodes)

    def add(self, key: K) -> None:
        """The newest, without a mark. Raises ValueError if it is there already."""
        if key in self._nodes:
            raise ValueError(f"{key!r} is in the pool already")
        node = self._nodes[key] = _Node(key, self._newest)
        if self._newest is None:
            self._oldest = node
        else:
            self._newest.newer = node
        self._newest = node

    def use(self, key: K) -> None:
        """Marks it. Raises KeyError if it is not there."""
        self._nodes[key].is_marked = True

    def remove(self, key: K) -> None:
        """Takes it out of turn. Raises KeyError if it is not there."""
        node = self._nodes.pop(key)
        if self._hand is node:
            self._hand = node.newer
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older

    def evict(self, may_leave: Callable[[K], bool]) -> K | None:
        """Removes and returns the next to go; None if none may leave.

        The hand passes over an object that may not leave as if it were not there: its mark stays.
        """
        node = self._hand or self._oldest
        for _ in range(2 * len(self._nodes)):  # the first round may do no more than take marks away
            assert node is not None
            if may_leave(node.key):
                if not node.is_marked:
                    self._hand = node
                    self.remove(node.key)
                    return node.key
                node.is_marked = False
            node = node.newer or self._oldest
        return None

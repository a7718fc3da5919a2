"""Blocks on their way to a store node: booked with a placement, real once the directory announces them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence


class ExpectedBlocks:
    """Which keys each node is expected to hold soon, counted per booking.

    They lengthen a node's own leading run, so that a burst of requests with one prefix sees the first of
    them. They are no source to fetch from: their bytes do not exist yet.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[bytes, int]] = {}
        self._settling: deque[tuple[float, str, Sequence[bytes]]] = deque()

    def __len__(self) -> int:
        """Number of (node, key) pairs, those that settle included."""
        return sum(len(counts) for counts in self._counts.values())

    def add(self, node: str, keys: Sequence[bytes]) -> None:
        """`keys` will be at `node`. Every `add` is undone by one `drop` or `settle` of the same keys."""
        counts = self._counts.setdefault(node, {}) if keys else {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def drop(self, node: str, keys: Sequence[bytes]) -> None:
        """They will not come, or came and count as held now."""
        if not keys:
            return
        counts = self._counts[node]
        for key in keys:
            if counts[key] == 1:
                del counts[key]
            else:
                counts[key] -= 1
        if not counts:
            del self._counts[node]

    def settle(self, node: str, keys: Sequence[bytes], until: float) -> None:
        """They are there; expect them until their announcement must have come. `until` never decreases."""
        self._settling.append((until, node, keys))

    def expire(self, now: float) -> None:
        """Drop what has settled."""
        while self._settling and self._settling[0][0] <= now:
            _, node, keys = self._settling.popleft()
            self.drop(node, keys)

    def lengthen(self, keys: Sequence[bytes], held: Mapping[str, int]) -> Mapping[str, int]:
        """`held` (node → leading blocks of `keys`), each run lengthened by the keys its node expects."""
        if not self._counts:
            return held
        lengths = dict(held)
        for node, counts in self._counts.items():
            start = length = lengths.get(node, 0)
            while length < len(keys) and keys[length] in counts:
                length += 1
            if length > start:
                lengths[node] = length
        return lengths

"""Prefix match over all store nodes at once (Algorithm 1, FindBestPrefixMatch): key → bitmask of nodes.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from kvstore.messages import Tier

Key = TypeVar("Key", bound=Hashable)


class PrefixIndex(Generic[Key]):
    """Who holds which key. Not thread-safe.

    Keys are chained (a key names its block and everything before it), so only leading runs count: a node that
    holds blocks 0, 1 and 3 matches 2.
    """

    def __init__(self) -> None:
        self._masks: dict[Key, int] = {}
        self._bits: dict[str, int] = {}
        self._names: list[str] = []  # by bit; "" where it is free
        self._held: dict[str, set[Key]] = {}
        self._on_ssd: dict[str, set[Key]] = {}  # of those, what is not in DRAM

    def __len__(self) -> int:
        """Number of distinct keys."""
        return len(self._masks)

    @property
    def nodes(self) -> list[str]:
        return list(self._bits)

    def bit(self, node: str) -> int:
        """The node's bit number, given at first sight; when it is forgotten, another may get it."""
        bit = self._bits.get(node)
        if bit is None:
            if "" in self._names:
                bit = self._names.index("")
                self._names[bit] = node
            else:
                bit = len(self._names)
                self._names.append(node)
            self._bits[node] = bit
            self._held[node], self._on_ssd[node] = set(), set()
        return bit

    def add(self, node: str, keys: Iterable[Key], tier: Tier = "dram") -> None:
        """`node` holds `keys`, there and nowhere else."""
        mask = 1 << self.bit(node)
        masks, held, on_ssd = self._masks, self._held[node], self._on_ssd[node]
        added = tuple(keys)
        get = masks.get
        for key in added:
            masks[key] = get(key, 0) | mask
        held.update(added)
        if tier == "ssd":
            on_ssd.update(added)
        elif on_ssd:
            on_ssd.difference_update(added)

    def remove(self, node: str, keys: Iterable[Key]) -> None:
        """`node` no longer holds `keys`; those it never held are no error."""
        if node not in self._bits:
            return
        held = self._held[node]
        gone = held.intersection(keys)
        if self._on_ssd[node]:
            self._on_ssd[node] -= gone
        self._clear(self._bits[node], gone, held)

    def forget(self, node: str) -> None:
        """`node` is gone, with all it held."""
        bit = self._bits.pop(node, None)
        if bit is None:
            return
        self._names[bit] = ""
        held = self._held.pop(node)
        del self._on_ssd[node]
        self._clear(bit, tuple(held), held)

    def keys(self, node: str, tier: Tier | None = None) -> set[Key]:
        """What `node` holds (a copy), in all tiers or in one."""
        if tier == "ssd":
            return set(self._on_ssd.get(node, ()))
        held = set(self._held.get(node, ()))
        return held if tier is None else held - self._on_ssd.get(node, set())

    def holds(self, node: str, key: Key) -> bool:
        """Whether `node` holds `key`."""
        return key in self._held.get(node, ())

    def num_keys(self, node: str) -> int:
        return len(self._held.get(node, ()))

    def held(self, keys: Iterable[Key], *, but: str = "") -> list[bool]:
        """Whether some node other than `but` holds each key."""
        others = ~(1 << self._bits[but]) if but in self._bits else -1
        get = self._masks.get
        return [get(key, 0) & others != 0 for key in keys]

    def holders(self, key: Key) -> list[str]:
        """The nodes that hold `key`."""
        return self._nodes_of(self._masks.get(key, 0))

    def replicas(self, key: Key) -> dict[str, Tier]:
        """The nodes that hold `key`, and where."""
        return {node: "ssd" if key in self._on_ssd[node] else "dram" for node in self.holders(key)}

    def runs(self, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """`(length, mask)`: the nodes with these bits hold exactly the first `length` keys; shortest first.

        Walks the chain once, for all nodes at a time, no further than the longest run.
        """
        get = self._masks.get
        runs: list[tuple[int, int]] = []
        alive, length = -1, 0
        for key in keys:
            both = alive & get(key, 0)
            if both != alive:
                if length:
                    runs.append((length, alive & ~both))
                if not both:
                    return runs
                alive = both
            length += 1
        if length:
            runs.append((length, alive))
        return runs

    def lengths(self, keys: Sequence[Key]) -> dict[str, int]:
        """The length of the leading run of every node that holds `keys[0]`; shortest first."""
        names, lengths = self._names, {}
        for length, mask in self.runs(keys):
            while mask:  # from the top: the mask gets shorter, which matters for a thousand nodes
                bit = mask.bit_length() - 1
                lengths[names[bit]] = length
                mask ^= 1 << bit
        return lengths

    def num_on_ssd(self, keys: Sequence[Key], lengths: Mapping[str, int]) -> dict[str, int]:
        """Per node: how many of its first `lengths[node]` keys it has on SSD only; nodes without any are left out."""
        counts = {}
        for node, length in lengths.items():
            on_ssd = self._on_ssd.get(node)
            if on_ssd and (count := sum(key in on_ssd for key in keys[:length])):
                counts[node] = count
        return counts

    def continued(self, keys: Sequence[Key], lengths: Mapping[str, int]) -> int:
        """How many keys, after the longest run in `lengths` (of these keys), a node holds that has not the first one.

        A decode instance that generated an answer has its blocks, and not those of the prompt before it.
        """
        start = max(lengths.values(), default=0)
        if not 0 < start < len(keys):
            return 0
        others = self._masks.get(keys[start], 0) & ~self._masks.get(keys[0], 0)
        length = 0
        while others and start + length < len(keys):
            others &= self._masks.get(keys[start + length], 0)
            length += bool(others)
        return length

    def _nodes_of(self, mask: int) -> list[str]:
        names, nodes = self._names, []
        while mask:
            bit = mask.bit_length() - 1
            nodes.append(names[bit])
            mask ^= 1 << bit
        nodes.reverse()
        return nodes

    def _clear(self, bit: int, keys: Collection[Key], held: set[Key]) -> None:
        # `keys`: distinct, and all of them held
        masks, mask = self._masks, 1 << bit
        for key in keys:
            left = masks[key] ^ mask
            if left:
                masks[key] = left
            else:
                del masks[key]
        held.difference_update(keys)

"""What a node holds that the directory has not heard yet: the last state of each changed key. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from kvstore.messages import Tier

_T = TypeVar("_T")


class News(NamedTuple):
    """Keys that are in DRAM from now on, on SSD only, or not here any more."""

    added: list[bytes]
    on_ssd: list[bytes]
    removed: list[bytes]


class Changes:
    """Changes since a snapshot, coalesced per key and bounded; too many, and a new snapshot is `needed`.

    Not thread-safe: the store records under its lock and hands out batches under it too.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._present: dict[bytes, Tier] = {}
        self._absent: dict[bytes, None] = {}
        self.needed = True  # nothing is recorded until the first snapshot

    def __len__(self) -> int:
        return len(self._present) + len(self._absent)

    def restart(self, in_dram: Iterable[bytes], on_ssd: Iterable[bytes] = ()) -> None:
        """Begin with a snapshot: everything held now is new."""
        self._present = dict.fromkeys(on_ssd, "ssd")
        self._present.update((key, "dram") for key in in_dram)
        self._absent = {}
        self.needed = False

    def record(
        self, *, added: Iterable[bytes] = (), on_ssd: Iterable[bytes] = (), removed: Iterable[bytes] = ()
    ) -> None:
        """Keys that went, fell to SSD and came, in that order; a key in two has the later state."""
        if self.needed:
            return
        for key in removed:
            self._present.pop(key, None)
            self._absent[key] = None
        for key in on_ssd:
            self._absent.pop(key, None)
            self._present[key] = "ssd"
        for key in added:
            self._absent.pop(key, None)
            self._present[key] = "dram"
        if len(self) > self._limit:
            self._present, self._absent, self.needed = {}, {}, True

    def take(self, limit: int) -> News:
        """At most `limit` changes.

        What went comes first: so the directory never believes that a node holds more than it has room for.
        """
        removed = list(_pop_first(self._absent, limit))
        present = _pop_first(self._present, limit - len(removed))
        return News(
            [key for key, tier in present.items() if tier == "dram"],
            [key for key, tier in present.items() if tier == "ssd"],
            removed,
        )


def _pop_first(keys: dict[bytes, _T], limit: int) -> dict[bytes, _T]:
    taken = {key: value for (key, value), _ in zip(keys.items(), range(limit), strict=False)}
    for key in taken:
        del keys[key]
    return taken

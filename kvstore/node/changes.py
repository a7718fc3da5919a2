"""What a node holds that the directory has not heard yet: the last state of each changed key. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Changes:
    """Changes since a snapshot, coalesced per key and bounded; too many, and a new snapshot is `needed`.

    Not thread-safe: the store records under its lock and hands out batches under it too.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._present: dict[bytes, None] = {}
        self._absent: dict[bytes, None] = {}
        self.needed = True  # nothing is recorded until the first snapshot

    def __len__(self) -> int:
        return len(self._present) + len(self._absent)

    def restart(self, keys: Iterable[bytes]) -> None:
        """Begin with a snapshot: everything held now is new."""
        self._present = dict.fromkeys(keys)
        self._absent = {}
        self.needed = False

    def record(self, *, added: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """Keys that came and keys that went, one after the other; a key in both has come last."""
        if self.needed:
            return
        for key in removed:
            self._present.pop(key, None)
            self._absent[key] = None
        for key in added:
            self._absent.pop(key, None)
            self._present[key] = None
        if len(self) > self._limit:
            self._present, self._absent, self.needed = {}, {}, True

    def take(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """At most `limit` changes `(added, removed)`.

        What went comes first: so the directory never believes that a node holds more than it has room for.
        """
        removed = _pop_first(self._absent, limit)
        return _pop_first(self._present, limit - len(removed)), removed


def _pop_first(keys: dict[bytes, None], limit: int) -> list[bytes]:
    taken = [key for key, _ in zip(keys, range(limit), strict=False)]
    for key in taken:
        del keys[key]
    return taken

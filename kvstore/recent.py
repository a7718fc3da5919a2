"""What a client itself learned of a key a moment ago, before the directory's stream tells it. Pure."""

from __future__ import annotations

from collections import OrderedDict

_CAPACITY = 100_000


class RecentKeys:
    """(key, node) pairs that this client stored, removed or found stale, believed for `seconds`.

    That is long enough for the stream to catch up, and short enough that a wrong belief does not last.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._known: OrderedDict[bytes, dict[str, tuple[bool, float]]] = OrderedDict()

    def note(self, key: bytes, node: str, present: bool, now: float) -> None:
        """`node` does (not) hold `key`."""
        beliefs = self._known.pop(key, {})
        beliefs[node] = (present, now + self._seconds)
        self._known[key] = beliefs
        while len(self._known) > _CAPACITY:
            self._known.popitem(last=False)

    def correct(self, key: bytes, holders: list[str], now: float) -> list[str]:
        """`holders` of `key` as the directory tells them, with what is known better."""
        beliefs = self._known.get(key)
        if beliefs is None:
            return holders
        live = {node: present for node, (present, until) in beliefs.items() if until > now}
        if not live:
            del self._known[key]
            return holders
        kept = [node for node in holders if live.get(node, True)]
        return kept + [node for node, present in live.items() if present and node not in holders]

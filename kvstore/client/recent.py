"""What a client itself learned of a key a moment ago, before the directory's stream tells it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

_CAPACITY = 100_000


class _Belief(NamedTuple):
    present: bool
    until: float
    firm: bool


class RecentKeys:
    """What this client knows of (key, node) pairs, believed for `seconds`.

    That is long enough for the stream to catch up, and short enough that a wrong belief does not last. Own
    puts and removes are `firm`; that a holder was found stale counts only until the stream names it again.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._known: OrderedDict[bytes, dict[str, _Belief]] = OrderedDict()

    def note(self, key: bytes, node: str, *, present: bool, firm: bool, now: float) -> None:
        """`node` does (not) hold `key`."""
        beliefs = self._known.pop(key, {})
        beliefs[node] = _Belief(present, now + self._seconds, firm)
        self._known[key] = beliefs
        while len(self._known) > _CAPACITY:
            self._known.popitem(last=False)

    def heard(self, node: str, keys: Sequence[bytes]) -> None:
        """The stream says that `node` holds `keys` from now on."""
        for key in keys:
            beliefs = self._known.get(key)
            if beliefs is not None and node in beliefs and not beliefs[node].firm:
                del beliefs[node]

    def knows(self, keys: Sequence[bytes]) -> bool:
        """Whether `correct` may have anything to say of one of `keys`."""
        known = self._known
        return bool(known) and any(key in known for key in keys)

    def correct(self, key: bytes, holders: list[str], now: float) -> list[str]:
        """`holders` of `key` as the directory tells them, with what is known better."""
        beliefs = self._known.get(key)
        if beliefs is None:
            return holders
        live = {node: belief.present for node, belief in beliefs.items() if belief.until > now}
        if not live:
            del self._known[key]
            return holders
        kept = [node for node in holders if live.get(node, True)]
        return kept + [node for node, present in live.items() if present and node not in holders]

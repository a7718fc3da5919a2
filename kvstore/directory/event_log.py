"""The directory's recent events, numbered, so that a watcher can go on where it was. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from kvstore.messages import MAX_BATCH_KEYS, KeysChanged, WatchEvent

_MAX_BATCH_EVENTS = 512


def _weight(event: WatchEvent) -> int:
    if not isinstance(event, KeysChanged):
        return 1
    return 1 + len(event.added) + len(event.on_ssd) + len(event.removed)


def split(events: Iterable[WatchEvent]) -> Iterator[list[WatchEvent]]:
    """Events in order, in lists that fit into one message each."""
    batch: list[WatchEvent] = []
    room = 2 * MAX_BATCH_KEYS
    for event in events:
        if batch and (_weight(event) > room or len(batch) == _MAX_BATCH_EVENTS):
            yield batch
            batch, room = [], 2 * MAX_BATCH_KEYS
        batch.append(event)
        room -= _weight(event)
    if batch:
        yield batch


class EventLog:
    """Events 1, 2, …; the oldest are dropped when the log holds more than `capacity` keys and events.

    All watchers read the one log, each at its own place: a slow one costs no memory, it only falls off the
    end.
    """

    def __init__(self, capacity: int):
        self.sequence = 0  # of the last event
        self._capacity = capacity
        self._events: deque[WatchEvent] = deque()
        self._weight = 0

    def append(self, event: WatchEvent) -> None:
        self.sequence += 1
        self._events.append(event)
        self._weight += _weight(event)
        while self._weight > self._capacity and len(self._events) > 1:
            self._weight -= _weight(self._events.popleft())

    def since(self, sequence: int) -> list[WatchEvent] | None:
        """The next events after `sequence`, at most one message full; None if they are not here (any more)."""
        first = self.sequence - len(self._events)
        if not first <= sequence <= self.sequence:
            return None
        return next(split(islice(self._events, sequence - first, None)), [])

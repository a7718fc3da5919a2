"""Which object is in which slot of the SSD tier, in the order of use. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstore.node.ssd.records import Put


@dataclass(slots=True, eq=False)
class Entry:
    """One object on SSD. `num_readers` are reading its slot now: it is not written to meanwhile."""

    put: Put
    record_nbytes: int  # of `put` in the journal
    num_readers: int = 0
    dropped: bool = False


class Catalog:
    """Slots are free, taken (being written), held by an entry, or held by a dropped entry that is being read."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def keys(self) -> list[bytes]:
        return list(self._entries)

    def entries(self) -> Iterable[Entry]:
        """All of them, least recently used first."""
        return self._entries.values()

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def restore(self, puts: Iterable[tuple[Put, int]]) -> None:
        """Fill an empty catalog with puts and the sizes of their records, of keys that differ.

        Of two for one slot the later counts: it has overwritten the other.
        """
        by_slot = {put.slot: Entry(put, record_nbytes) for put, record_nbytes in puts}
        self._entries = OrderedDict((entry.put.key, entry) for entry in by_slot.values())
        self._free = deque(slot for slot in range(self.num_slots) if slot not in by_slot)

    def take_slot(self) -> int | None:
        """A free slot, the caller's from now on."""
        return self._free.popleft() if self._free else None

    def give_back(self, slot: int) -> None:
        """A taken slot is free again."""
        self._free.append(slot)

    def victims(self) -> Iterator[Entry]:
        """What may be given up, least recently used first."""
        return (entry for entry in self._entries.values() if not entry.num_readers)

    def add(self, put: Put, record_nbytes: int) -> None:
        """A taken slot holds `put.key` from now on, just used."""
        self._entries[put.key] = Entry(put, record_nbytes)

    def touch(self, key: bytes) -> None:
        """The key was used."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def drop(self, key: bytes) -> Entry | None:
        """Forget a key. Its slot is free when nobody reads it any more."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.dropped = True
            if not entry.num_readers:
                self._free.append(entry.put.slot)
        return entry

    def begin_read(self, key: bytes) -> Entry | None:
        """The entry, whose slot stays as it is until `end_read`; just used."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.num_readers += 1
            self._entries.move_to_end(key)
        return entry

    def end_read(self, entry: Entry) -> None:
        entry.num_readers -= 1
        if entry.dropped and not entry.num_readers:
            self._free.append(entry.put.slot)

    def clear(self) -> list[bytes]:
        """Forget everything; the keys."""
        keys = self.keys()
        for key in keys:
            self.drop(key)
        return keys

    def validate(self, num_taken: int) -> None:
        """Raise AssertionError if the books do not balance; `num_taken` slots are being written or read."""
        held = [entry.put.slot for entry in self._entries.values()]
        slots = [*self._free, *held]
        if len(set(slots)) != len(slots) or len(slots) + num_taken != self.num_slots:
            raise AssertionError(f"SSD slots: {len(self._free)} free, {len(held)} held, of {self.num_slots}")

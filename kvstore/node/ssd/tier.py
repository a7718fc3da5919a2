"""The SSD tier: one file of slots and the journal that names them, inside a number of bytes.

What it reads is what was written under that key, or nothing: every part is compared with its crc32. A process
that is killed leaves a state from which the next one goes on: a slot's bytes are written before the record that
names them, and a record that ends an object before anything else is written into its slot. After a loss of power
records may be missing or slots may hold other bytes; the crcs tell.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.errors import InvalidError
from kvstore.node.ssd.catalog import Catalog
from kvstore.node.ssd.journal import Journal
from kvstore.node.ssd.records import VERSION, Header, Put, frame
from kvstore.parts import part_crcs

_PAGE_NBYTES = 4096
_FILES_NBYTES = (
    64 << 10
)  # what the file system itself needs for a folder and three files, and a short journal
_JOURNAL_NBYTES_PER_SLOT = 384  # records of a dozen parts twice, and garbage
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 1.0, 60.0  # after a write that failed
_COMPACT_FIRST = -1  # instead of a slot
_SLOTS, _JOURNAL = "slots", "journal"
log = logging.getLogger(__name__)


def num_ssd_slots(ssd_nbytes: int, slot_nbytes: int) -> int:
    """How many objects of up to `slot_nbytes` fit into `ssd_nbytes`, journal and file system included.

    Raises InvalidError for none.
    """
    num = (ssd_nbytes - 2 * _FILES_NBYTES) // (_stride(slot_nbytes) + _JOURNAL_NBYTES_PER_SLOT)
    if num < 1:
        needed = 2 * _FILES_NBYTES + _stride(slot_nbytes) + _JOURNAL_NBYTES_PER_SLOT
        raise InvalidError(
            f"{ssd_nbytes} bytes of SSD do not hold one slot of {slot_nbytes}: give at least {needed}"
        )
    return num


def _stride(slot_nbytes: int) -> int:
    return -(-slot_nbytes // _PAGE_NBYTES) * _PAGE_NBYTES


class Staged(NamedTuple):
    """Bytes in a slot that no record names yet."""

    put: Put


class SsdTier:
    """Thread-safe. Files are written and read outside its lock.

    A write that fails (no room, a bad disk) costs that object; for a while nothing more is written. A journal
    that can no longer tell what is dropped is removed, and with it all the tier holds. Its verbs raise nothing.
    `take_gone` tells which keys are no longer here.
    """

    def __init__(
        self, folder: Path, ssd_nbytes: int, slot_nbytes: int, *, clock: Callable[[], float] = time.monotonic
    ):
        """Opens or makes the tier in `folder`, which is its own; files of others there count as used bytes.

        Raises OSError when the folder cannot be used, InvalidError when another node is using it or not one
        slot fits.
        """
        folder.mkdir(parents=True, exist_ok=True)
        num_slots = _num_slots_beside(_foreign_nbytes(folder), ssd_nbytes, slot_nbytes)
        self._stride = _stride(slot_nbytes)
        self._clock = clock
        self._compacting = threading.Lock()  # comes before the next
        self._changed = threading.Condition()  # guards everything below; notified when a reader leaves
        self._catalog = Catalog(num_slots)
        self._num_open = 0  # slots being written
        self._staged: dict[int, int] = {}  # of those: what their records may take in the journal
        self._staged_nbytes = 0
        self._num_readers = 0
        self._gone: list[bytes] = []
        self._counters: Counter[str] = Counter()
        self._rest_until, self._rest_seconds = 0.0, _FIRST_REST_SECONDS
        self._failed = self._closed = False
        self._fd = os.open(folder / _SLOTS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take_lock(folder)
            if os.fstat(self._fd).st_size > num_slots * self._stride:
                os.ftruncate(self._fd, num_slots * self._stride)
            max_nbytes = _FILES_NBYTES + num_slots * _JOURNAL_NBYTES_PER_SLOT
            self._journal = Journal(folder / _JOURNAL, Header(VERSION, self._stride), max_nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._restore()

    def _take_lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidError(
                f"{folder} is in use by another store node: give each its own folder"
            ) from None

    def _restore(self) -> None:
        """Take what the journal says and the file can hold; the rest is forgotten for good."""
        size = os.fstat(self._fd).st_size
        said = self._journal.take_replayed()
        kept = [
            (put, nbytes)
            for put, nbytes in said
            if put.slot < self._catalog.num_slots
            and put.slot * self._stride + put.nbytes <= size
            and put.nbytes <= self._stride
        ]
        self._catalog.restore(kept)
        if len(self._catalog) < len(said) or not self._journal.fits(0):
            log.warning("SSD tier: %d of %d objects are still there", len(self._catalog), len(said))
            with self._journal_guard():
                self._journal.compact(entry.put for entry in self._catalog.entries())

    def __contains__(self, key: object) -> bool:
        return key in self._catalog

    @property
    def num_slots(self) -> int:
        return self._catalog.num_slots

    def keys(self) -> list[bytes]:
        """Everything it holds."""
        with self._changed:
            return self._catalog.keys()

    def namespaces(self) -> dict[bytes, str]:
        """The namespace of every key."""
        with self._changed:
            return {entry.put.key: entry.put.namespace for entry in self._catalog.entries()}

    def describe(self, key: bytes) -> Put | None:
        """Size, parts and crcs of an object."""
        entry = self._catalog.get(key)
        return None if entry is None else entry.put

    @property
    def accepts(self) -> bool:
        """Whether writing is worth a try now."""
        return not self._failed and not self._closed and self._clock() >= self._rest_until

    def stage(
        self, key: bytes, data: memoryview, part_nbytes: int, crcs: Sequence[int], namespace: str = ""
    ) -> Staged | None:
        """Write an object into a slot; the least recently used one gives way. None when that fails.

        End it with `publish` or `discard`.
        """
        widest = Put(key, self.num_slots, len(data), part_nbytes, tuple(crcs), namespace)
        nbytes = len(frame(widest))
        if len(data) > self._stride:
            return None
        while True:
            with self._changed:
                slot = self._make_room(nbytes) if self.accepts else None
                if slot is None:
                    return None
                if slot >= 0:
                    self._num_open += 1
                    self._staged[slot] = nbytes
                    self._staged_nbytes += nbytes
                    break
            self._compact()
        try:
            _write_all(self._fd, data, slot * self._stride)
        except OSError as error:
            with self._changed:
                self._give_back(slot)
                self._rest(error)
            return None
        return Staged(msgspec.structs.replace(widest, slot=slot))

    def sync(self) -> bool:
        """What was staged is on the device; it leaves the page cache, which would hold it a second time. False: it may not
        be on the device, and is to be discarded."""
        try:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            with self._changed:
                self._rest(error)
            return False
        return True

    def publish(self, staged: Sequence[Staged]) -> None:
        """Name staged objects in the journal: from now on they are here."""
        with self._changed:
            for item in staged:
                self._publish(item.put)

    def discard(self, staged: Iterable[Staged]) -> None:
        """Give staged objects up."""
        with self._changed:
            for item in staged:
                self._give_back(item.put.slot)

    def read(self, put: Put, into: memoryview) -> bool:
        """Read an object, as `describe` told it, into memory of its size, and compare its crcs.

        False if it is not here any more, or damaged: then it is dropped and counted, and `into` holds
        anything.
        """
        key = put.key
        with self._changed:
            entry = None if self._closed else self._catalog.begin_read(key)
            if entry is None:
                return False
            if entry.put != put:
                self._catalog.end_read(entry)
                return False
            self._num_readers += 1
        intact = False
        try:
            intact = self._read(entry.put, into)
        finally:
            with self._changed:
                if not intact and not entry.dropped:
                    self._counters["damaged"] += 1
                    self._gone += [key] if self._drop(key) else []
                self._counters["read"] += intact
                self._num_readers -= 1
                self._catalog.end_read(entry)
                self._changed.notify_all()
        return intact and not entry.dropped

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used elsewhere just now."""
        with self._changed:
            for key in keys:
                self._catalog.touch(key)

    def drop(self, key: bytes) -> bool:
        """Forget an object now. False if it is not here."""
        with self._changed:
            return self._drop(key)

    def take_gone(self) -> list[bytes]:
        """Keys that gave way, were damaged or went with the disk, since the last call."""
        if not self._gone:
            return []
        with self._changed:
            gone, self._gone = self._gone, []
            return gone

    def stats(self) -> dict[str, int]:
        """Slots, and what happened, all with the prefix `ssd_`."""
        with self._changed:
            counted = ("spilled", "read", "damaged", "evicted", "failed")
            return {
                "ssd_slots": self._catalog.num_slots,
                "ssd_free": self._catalog.num_free,
                "ssd_held": len(self._catalog),
                "ssd_writable": int(self.accepts),
                **{f"ssd_{name}": self._counters[name] for name in counted},
            }

    def validate(self) -> None:
        """Raise AssertionError if the books do not balance, with nobody reading."""
        with self._changed:
            self._catalog.validate(self._num_open)

    def close(self) -> None:
        """Wait for readers, then close the files; what they hold stays for the next start."""
        with self._compacting, self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: not self._num_readers)
            self._journal.close()
            os.close(self._fd)

    def _read(self, put: Put, into: memoryview) -> bool:
        try:
            done = 0
            while done < put.nbytes:
                count = os.preadv(self._fd, [into[done:]], put.slot * self._stride + done)
                if not count:
                    log.warning("SSD tier: slot %d ends after %d of %d bytes", put.slot, done, put.nbytes)
                    return False
                done += count
        except OSError as error:
            log.warning("SSD tier: slot %d cannot be read: %s", put.slot, error)
            return False
        if part_crcs(into, put.part_nbytes) == put.crcs:
            return True
        log.warning("SSD tier: slot %d does not hold what was written", put.slot)
        return False

    def _make_room(self, record_nbytes: int) -> int | None:
        """A slot to write into, with room for its record; `_COMPACT_FIRST` if that needs a shorter journal; None if
        there is none. Objects give way, least recently used first."""
        record_nbytes += self._staged_nbytes
        while not self._failed:
            if self._journal.fits(record_nbytes):
                slot = self._catalog.take_slot()
                if slot is not None:
                    return slot
            elif self._journal.fits_compacted(record_nbytes):
                return _COMPACT_FIRST
            victim = next(self._catalog.victims(), None)
            if victim is None:
                return None
            self._counters["evicted"] += 1
            self._gone += [victim.put.key] if self._drop(victim.put.key) else []
        return None

    def _compact(self) -> None:
        """Shorten the journal. The device is waited for without the lock: nobody who reads or drops waits with it."""
        with self._compacting:
            with self._changed:
                if self._failed or self._closed:
                    return
                with self._journal_guard():
                    self._journal.begin(entry.put for entry in self._catalog.entries())
            with self._journal_guard():
                self._journal.sync()
            with self._changed:
                with self._journal_guard():
                    self._journal.end()
                if self._failed or self._closed:
                    return
            with self._journal_guard():
                self._journal.sync_folder()

    def _drop(self, key: bytes) -> bool:
        entry = self._catalog.get(key)
        if entry is None:
            return False
        with self._journal_guard():
            self._journal.drop(key, entry.record_nbytes)
        self._catalog.drop(key)
        return True

    def _publish(self, put: Put) -> None:
        self._unstage(put.slot)
        self._drop(put.key)
        raw = frame(put)
        try:
            if self._failed or self._closed:
                self._give_back(put.slot)
                return
            self._journal.put(raw)
        except OSError as error:
            self._give_back(put.slot)
            if self._journal.is_torn:
                self._fail(error)
            else:
                self._rest(error)
            return
        self._num_open -= 1
        self._catalog.add(put, len(raw))
        self._counters["spilled"] += 1
        self._rest_seconds = _FIRST_REST_SECONDS

    def _unstage(self, slot: int) -> None:
        self._staged_nbytes -= self._staged.pop(slot, 0)

    def _give_back(self, slot: int) -> None:
        self._unstage(slot)
        self._num_open -= 1
        self._catalog.give_back(slot)

    def _rest(self, error: OSError) -> None:
        """Write nothing for a while, longer each time."""
        self._counters["failed"] += 1
        log.warning(
            "SSD tier: cannot write, DRAM only for the next %g s (%d objects stay readable): %s",
            self._rest_seconds,
            len(self._catalog),
            error,
        )
        self._rest_until = self._clock() + self._rest_seconds
        self._rest_seconds = min(2 * self._rest_seconds, _LONGEST_REST_SECONDS)

    @contextlib.contextmanager
    def _journal_guard(self) -> Iterator[None]:
        """What fails in here ends the tier: it could not tell the next start what is no longer here."""
        try:
            yield
        except OSError as error:
            with self._changed:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._counters["failed"] += 1
        self._failed = True
        log.error("SSD tier: its journal cannot be written, DRAM only from now on: %s", error)
        with contextlib.suppress(OSError):
            self._journal.destroy()
        self._gone += self._catalog.clear()


def _num_slots_beside(foreign_nbytes: int, ssd_nbytes: int, slot_nbytes: int) -> int:
    num_ssd_slots(ssd_nbytes, slot_nbytes)
    try:
        return num_ssd_slots(ssd_nbytes - foreign_nbytes, slot_nbytes)
    except InvalidError:
        used = f"other files in the folder take {foreign_nbytes} of its {ssd_nbytes} bytes"
        raise OSError(errno.ENOSPC, used) from None


def _foreign_nbytes(folder: Path) -> int:
    """Bytes on disk of everything in `folder` that is not the tier's."""
    ours = {_SLOTS, _JOURNAL, f"{_JOURNAL}.new"}
    found = (path.lstat() for path in folder.rglob("*") if path.relative_to(folder).as_posix() not in ours)
    return sum(status.st_blocks * 512 for status in found)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)

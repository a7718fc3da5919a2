"""The journal of the SSD tier as a file: append, replay, compact, never beyond its size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstore.node.ssd.records import Drop, Header, Put, frame, parse

_NEW = ".new"


@dataclass
class _Successor:
    """The file that will replace the journal: it says what held when the journal had `start` bytes."""

    fd: int
    start: int
    nbytes: int
    given_up: bool = False


class Journal:
    """Records of what the slots file holds. Not thread-safe, but for `sync`.

    A compaction is `begin`, `sync` (which takes its time, and may be called while records are appended) and `end`.
    Meanwhile the old file and the new one are there together: `max_nbytes` bounds their sum, at all times, because
    nothing is appended that would not leave room for a compaction, and one that has no room any more is given up.
    """

    def __init__(self, path: Path, header: Header, max_nbytes: int):
        """Opens `path`, or makes it; removes a torn end and the leftover of a compaction.

        A journal with another header says nothing. Raises OSError.
        """
        self.is_torn = False  # it ends in the middle of a record: what comes after that is never read
        self._path = path
        self._max_nbytes = max_nbytes
        self._header = frame(header)
        self._next: _Successor | None = None
        _new(path).unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._puts = self._replay(header)
        except BaseException:
            os.close(self._fd)
            raise

    def _replay(self, header: Header) -> dict[bytes, tuple[Put, int]]:
        records, good = parse(_read_all(self._fd))
        if not records or records[0] != header:
            records, good = [], 0
        os.ftruncate(self._fd, good)
        self._nbytes = good
        if not good:
            self._write(self._header)
        live: dict[bytes, tuple[Put, int]] = {}
        for record in records[1:]:
            if isinstance(record, Put):
                live.pop(record.key, None)  # their order is that of the last puts
                live[record.key] = record, len(frame(record))
            elif isinstance(record, Drop):
                live.pop(record.key, None)
        self._live_nbytes = len(self._header) + sum(nbytes for _, nbytes in live.values())
        return live

    def take_replayed(self) -> list[tuple[Put, int]]:
        """What it said when it was opened, with the size of each record; the oldest first. Once."""
        puts, self._puts = self._puts, {}
        return list(puts.values())

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self._nbytes

    def fits(self, record_nbytes: int) -> bool:
        """Whether a Put of that size can be appended now, with some room for what comes during a compaction."""
        spare = self._max_nbytes // 8
        return self._nbytes + self._live_nbytes + 2 * record_nbytes + spare <= self._max_nbytes

    def fits_compacted(self, record_nbytes: int) -> bool:
        """Whether it can after a compaction, and for a good while: else each put would need one."""
        return 2 * (self._live_nbytes + record_nbytes) <= self._max_nbytes * 3 // 4

    def put(self, raw: bytes) -> None:
        """Append the framed Put. Raises OSError, and the journal is as before, unless all of it was written."""
        self._write(raw)
        self._live_nbytes += len(raw)

    def drop(self, key: bytes, put_nbytes: int) -> None:
        """Append a Drop of `key`, whose Put takes `put_nbytes`. Raises OSError as `put` does."""
        self._write(frame(Drop(key)))
        self._live_nbytes -= put_nbytes

    def compact(self, puts: Iterable[Put]) -> None:
        """Replace the file by one that says `puts` and nothing else. Raises OSError; then it is as before."""
        self.begin(puts)
        self.sync()
        self.end()
        self.sync_folder()

    def begin(self, puts: Iterable[Put]) -> None:
        """Write the successor, which says `puts`: all that is held now. Raises OSError.

        Where both files do not fit (the bound is lower than at the last start), the old one goes first: a crash
        in between leaves nothing, which is a loss and no damage.
        """
        raw = b"".join([self._header, *map(frame, puts)])
        if self._nbytes + len(raw) > self._max_nbytes:
            os.ftruncate(self._fd, 0)
            self._nbytes = 0
            self._write(raw)
            self._live_nbytes = len(raw)
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._next = _Successor(os.open(_new(self._path), flags, 0o600), self._nbytes, 0)
        try:
            _write_all(self._next.fd, raw)
        except BaseException:
            self._abandon()
            raise
        self._next.nbytes = self._live_nbytes = len(raw)

    def sync(self) -> None:
        """What `begin` wrote is on the device. Raises OSError; then call `end` all the same."""
        successor = self._next
        if successor is not None and not successor.given_up:
            try:
                os.fsync(successor.fd)
            except OSError:
                successor.given_up = True
                raise

    def end(self) -> None:
        """Put the successor in its place, with what was appended since; or away, if it was given up. Raises OSError."""
        successor = self._next
        if successor is None:
            return
        try:
            if successor.given_up:
                return
            tail = os.pread(self._fd, self._nbytes - successor.start, successor.start)
            _write_all(successor.fd, tail)
            os.rename(_new(self._path), self._path)
            self._next = None
        finally:
            if self._next is not None:
                self._abandon()
        os.close(self._fd)
        self._fd, self._nbytes = successor.fd, successor.nbytes + len(tail)

    def sync_folder(self) -> None:
        """After `end`: the folder names the new file on the device too. Raises OSError."""
        fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Not while another thread is in `sync`."""
        if self._next is not None:
            self._abandon()
        os.close(self._fd)

    def destroy(self) -> None:
        """Remove the file, which needs no room: nothing that it says comes back."""
        self._path.unlink(missing_ok=True)
        self._give_up()

    def _give_up(self) -> None:
        """The successor takes no room from now on; `end` closes it, when nobody syncs it any more."""
        successor = self._next
        if successor is not None and not successor.given_up:
            successor.given_up = True
            with contextlib.suppress(OSError):
                os.ftruncate(successor.fd, 0)
            with contextlib.suppress(OSError):
                _new(self._path).unlink(missing_ok=True)

    def _abandon(self) -> None:
        self._give_up()
        successor, self._next = self._next, None
        if successor is not None:
            with contextlib.suppress(OSError):
                _new(self._path).unlink(missing_ok=True)
            os.close(successor.fd)

    def _write(self, raw: bytes) -> None:
        successor = self._next
        if successor is not None:
            repeated = self._nbytes - successor.start + 2 * len(raw)  # `end` writes it a second time
            if self._nbytes + successor.nbytes + repeated > self._max_nbytes:
                self._give_up()
        try:
            _write_all(self._fd, raw)
        except OSError:
            try:
                os.ftruncate(self._fd, self._nbytes)
            except OSError:
                self.is_torn = True
            raise
        self._nbytes += len(raw)


def _new(path: Path) -> Path:
    return path.with_name(path.name + _NEW)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    pieces = []
    while size > (at := sum(map(len, pieces))):
        pieces.append(os.pread(fd, size - at, at))
        if not pieces[-1]:
            break
    return b"".join(pieces)


def _write_all(fd: int, raw: bytes) -> None:
    rest = memoryview(raw)
    while rest:
        rest = rest[os.write(fd, rest) :]

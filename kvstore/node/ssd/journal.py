"""The journal of the SSD tier as a file: append, replay, compact, never beyond its size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from kvstore.node.ssd.records import Drop, Header, Put, frame, parse

_NEW = ".new"


class Journal:
    """Records of what the slots file holds. Not thread-safe.

    While it is compacted, the old file and the new one are there together: `max_nbytes` bounds their sum, at
    all times, because nothing is appended that would not leave room for a compaction.
    """

    def __init__(self, path: Path, header: Header, max_nbytes: int):
        """Opens `path`, or makes it; removes a torn end and the leftover of a compaction.

        A journal with another header says nothing. Raises OSError.
        """
        self.is_torn = False  # it ends in the middle of a record: what comes after that is never read
        self._path = path
        self._max_nbytes = max_nbytes
        self._header = frame(header)
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
        """Whether a Put of that size can be appended now."""
        return self._nbytes + self._live_nbytes + 2 * record_nbytes <= self._max_nbytes

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
        """Replace the file by one that says `puts` and nothing else. Raises OSError; then it is as before.

        Where both do not fit (the bound is lower than at the last start), the old one goes first: a crash
        in between leaves nothing, which is a loss and no damage.
        """
        raw = b"".join([self._header, *map(frame, puts)])
        if self._nbytes + len(raw) > self._max_nbytes:
            os.ftruncate(self._fd, 0)
            self._nbytes = 0
            self._write(raw)
        else:
            self._replace(raw)
        self._live_nbytes = len(raw)

    def _replace(self, raw: bytes) -> None:
        new = _new(self._path)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, raw)
            os.fsync(fd)
            os.rename(new, self._path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self._nbytes = fd, len(raw)
        _sync_folder(self._path.parent)

    def close(self) -> None:
        os.close(self._fd)

    def destroy(self) -> None:
        """Remove the file, which needs no room: nothing that it says comes back."""
        self._path.unlink(missing_ok=True)

    def _write(self, raw: bytes) -> None:
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


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

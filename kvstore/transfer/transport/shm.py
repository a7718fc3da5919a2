"""Shared memory: files under /dev/shm that their owner creates and others on the host map.

The owner holds a lock on its file for as long as it lives: so anyone can tell, across containers and in
spite of reused process ids, whether it still does. `multiprocessing.shared_memory` is not used: its resource
tracker removes an owner's memory when an attacher exits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvstore.transfer.batch import Frame
from kvstore.transfer.segment import Segment
from kvstore.transfer.status import TransferError
from kvstore.transfer.transport.copier import Copier

SHM_DIR = "/dev/shm"
_PREFIX = "mooncake-"
_FILE_NAME = re.compile(r"mooncake-[0-9]+-[0-9a-f]{16}-[A-Za-z0-9._-]{1,100}")
_PAGE_NBYTES = mmap.PAGESIZE
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
log = logging.getLogger(__name__)


def sweep_stale() -> list[str]:
    """Removes the files of dead owners; returns their paths. Files of other users are left alone."""
    removed = []
    for entry in os.scandir(SHM_DIR):
        if not _FILE_NAME.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd, fcntl.LOCK_EX):
                    os.unlink(entry.path)
                    removed.append(entry.path)
            finally:
                os.close(fd)
    if removed:
        log.info("removed shared memory of dead processes: %s", removed)
    return removed


def _lock(fd: int, kind: int) -> bool:
    """Takes the lock if it is free."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SharedBuffer:
    """`nbytes` of zeroed shared memory, its pages all there, until `close()` or its owner's death."""

    def __init__(self, name: str, nbytes: int):
        """Creates /dev/shm/mooncake-<pid>-<epoch>-<name>, after a sweep of stale ones.

        Raises ValueError for a bad name or size, OSError if there is no room.
        """
        file_name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}-{name}"
        if not _FILE_NAME.fullmatch(file_name):
            raise ValueError(f"shared buffer name {name!r}: expected 1 to 100 of A-Z a-z 0-9 . _ -")
        if nbytes < 1:
            raise ValueError(f"shared buffer {name!r} of {nbytes} bytes: expected at least 1")
        sweep_stale()
        self.path = f"{SHM_DIR}/{file_name}"
        self.nbytes = nbytes
        self._fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if not os.fstat(self._fd).st_nlink:
                raise FileExistsError(f"{self.path} was swept while it was being created: try again")
            os.posix_fallocate(self._fd, 0, nbytes)
            self._map: mmap.mmap | None = mmap.mmap(self._fd, nbytes)
            self._array: np.ndarray | None = np.frombuffer(self._map, np.uint8)
        except BaseException as error:
            self._remove()
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise OSError(error.errno, _no_room(name, nbytes, error)) from error
            raise
        self._array[::_PAGE_NBYTES] = 0

    @property
    def array(self) -> np.ndarray:
        """The memory, uint8 `[nbytes]`. Raises ValueError once closed."""
        if self._array is None:
            raise ValueError(f"shared buffer {self.path} is closed")
        return self._array

    def close(self) -> None:
        """Removes the file. The memory lives for as long as a view of it does, here or where it is mapped."""
        if self._array is None:
            return
        self._array = self._map = None
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._fd)


def _no_room(name: str, nbytes: int, error: OSError) -> str:
    free = os.statvfs(SHM_DIR)
    return (
        f"no {nbytes} bytes of shared memory for {name!r}: {error.strerror} ({free.f_bavail * free.f_frsize} bytes are"
        f" free in {SHM_DIR}: ask for less, or give it more, in a container by --shm-size)"
    )


@dataclass
class _Attachment:
    fd: int
    memory: memoryview

    @property
    def is_owned(self) -> bool:
        """Whether the owner still lives and offers this memory."""
        if not os.fstat(self.fd).st_nlink:
            return False
        if _lock(self.fd, fcntl.LOCK_SH):
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            return False
        return True


class SharedMemoryPath(Copier):
    """The path to segments of other processes on this host; maps each file once."""

    def __init__(self) -> None:
        super().__init__("shm")
        self._lock = threading.Lock()
        self._attachments: dict[str, _Attachment] = {}

    @contextmanager
    def use(self, frame: Frame) -> Iterator[memoryview]:
        """Raises TransferError if the segment is not ours to map, or its owner has gone."""
        yield self.memory(frame.target)

    def memory(self, target: Segment) -> memoryview:
        """The segment, mapped; the mapping lives as long as views of it. Raises TransferError as `use` does."""
        with self._lock:
            found = self._attachments.get(target.shm_path)
            if found is None:
                self._detach([path for path, each in self._attachments.items() if not each.is_owned])
                found = self._attachments[target.shm_path] = _attach(target)
            if not found.is_owned:
                self._detach([target.shm_path])
                raise TransferError(_stale(target, "its owner has gone or closed it"))
            held = len(found.memory)
            if target.nbytes > held:
                raise TransferError(
                    f"segment {target.name!r} claims {target.nbytes} bytes, {target.shm_path} has {held}"
                )
            return found.memory[: target.nbytes]

    def _detach(self, paths: list[str]) -> None:
        for path in paths:
            os.close(self._attachments.pop(path).fd)

    def close(self) -> None:
        """Ends as every path does, and unmaps everything."""
        super().close()
        with self._lock:
            self._detach(list(self._attachments))


def _attach(target: Segment) -> _Attachment:
    folder, _, file_name = target.shm_path.rpartition("/")
    if folder != SHM_DIR or not _FILE_NAME.fullmatch(file_name):
        raise TransferError(
            f"segment {target.name!r} names {target.shm_path!r}, which is no shared memory of ours"
        )
    try:
        fd = os.open(target.shm_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(_stale(target, error.strerror or "cannot be opened")) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise TransferError(f"{target.shm_path} is not a regular file of this user: not mapped")
        memory = np.frombuffer(mmap.mmap(fd, status.st_size), np.uint8).data
        return _Attachment(fd, memory)
    except BaseException:
        os.close(fd)
        raise


def _stale(target: Segment, why: str) -> str:
    return f"stale segment {target.name!r} of epoch {target.peer.epoch:016x}, {target.shm_path}: {why}"

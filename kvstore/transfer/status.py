"""How requests end: their states, the error that reports failures, and the engine's counters."""

from __future__ import annotations

import enum
import threading
from typing import Literal, get_args

import msgspec

from kvstore.transfer.request import Opcode

Path = Literal["loopback", "shm", "tcp", "mooncake"]


class TransferState(enum.StrEnum):
    """WAITING: queued. PENDING: bytes may be moving. The others are final."""

    WAITING = "WAITING"
    PENDING = "PENDING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"

    @property
    def is_final(self) -> bool:
        return self not in (TransferState.WAITING, TransferState.PENDING)


class TransferStatus(msgspec.Struct, frozen=True):
    """State of one request, bytes known to have arrived, why it did not complete, and how many of its frames
    had to change to another rail."""

    state: TransferState
    nbytes_done: int
    reason: str = ""
    num_resubmitted: int = 0


class TransferError(Exception):
    """A transfer failed, or the engine refused an operation that would endanger one in flight."""


class OverdueError(TimeoutError):
    """The transfer's time was over before its bytes had moved; its request ends TIMEOUT."""


class Counters:
    """Bytes completed per path and direction; how many requests failed or timed out, and frames changed rails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {f"{path}_{way}": 0 for path in get_args(Path) for way in ("read", "write")}
        self._values["failed"] = self._values["resubmitted"] = 0

    def add_bytes(self, path: Path, opcode: Opcode, nbytes: int) -> None:
        with self._lock:
            self._values[f"{path}_{opcode.name.lower()}"] += nbytes

    def add_failed(self, num_requests: int) -> None:
        with self._lock:
            self._values["failed"] += num_requests

    def add_resubmitted(self) -> None:
        with self._lock:
            self._values["resubmitted"] += 1

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)

"""Faults on purpose, for tests: any path can be made slow, lossy, dead or corrupting."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.transfer.request import TransferRequest
from kvstore.transfer.status import Path


@dataclass(frozen=True)
class Fault:
    """What befalls one request: a delay before it starts, then a failure or one byte that arrives flipped."""

    delay_seconds: float = 0.0
    fail: str = ""
    corrupt_byte: int | None = None


@dataclass
class Faults:
    """Knobs, which may be turned while the engine runs; consulted once per request.

    `delay_seconds` of latency; `loss`, the chance that a request fails; `dead`, all fail; `corrupt_byte`,
    the index (modulo the request's size) of a byte that arrives with all its bits flipped. They apply on
    `paths`, and there to the requests that `only` accepts.
    """

    delay_seconds: float = 0.0
    loss: float = 0.0
    dead: bool = False
    corrupt_byte: int | None = None
    paths: frozenset[Path] = frozenset(("loopback", "shm", "tcp"))
    only: Callable[[TransferRequest], bool] | None = None
    seed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.loss <= 1 or self.delay_seconds < 0:
            raise ValueError(
                f"loss {self.loss} must lie in [0, 1] and delay_seconds {self.delay_seconds} be >= 0"
            )
        self._random = random.Random(self.seed)

    def decide(self, path: Path, request: TransferRequest) -> Fault | None:
        """The fault of this request on this path, None if it is spared."""
        if path not in self.paths or (self.only is not None and not self.only(request)):
            return None
        with self._lock:
            lost = self.loss > 0 and self._random.random() < self.loss
        fail = (
            f"injected fault: {path} is dead"
            if self.dead
            else f"injected fault: lost on {path}"
            if lost
            else ""
        )
        corrupt = self.corrupt_byte if request.local.nbytes else None
        if not fail and not self.delay_seconds and corrupt is None:
            return None
        return Fault(self.delay_seconds, fail, None if corrupt is None else corrupt % request.local.nbytes)

"""How long fetched prefixes took to arrive, kept until a heartbeat tells the Conductor."""

from __future__ import annotations

import threading
from collections import deque

from mooncake_jax.messages import Fetched

_NUM_KEPT = 64  # beyond a heartbeat's worth the oldest are dropped


class FetchTimes:
    """Fetches add, on threads of their own; the heartbeat takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Fetched] = deque(maxlen=_NUM_KEPT)

    def add(self, node: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._kept.append(Fetched(node, nbytes, seconds))

    def take(self) -> list[Fetched]:
        """Those added since the last call."""
        with self._lock:
            taken = list(self._kept)
            self._kept.clear()
        return taken

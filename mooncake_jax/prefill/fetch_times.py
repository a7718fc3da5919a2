"""How long fetched prefixes took to arrive, kept until heartbeats have told every Conductor."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from mooncake_jax.messages import Fetched

_NUM_KEPT = 64  # beyond a heartbeat's worth the oldest are dropped


class FetchTimes:
    """Fetches add, on threads of their own; the heartbeats to each Conductor read, each from where it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Fetched] = deque(maxlen=_NUM_KEPT)
        self._num_added = 0

    def add(self, node: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._kept.append(Fetched(node, nbytes, seconds))
            self._num_added += 1

    def since(self, num_read: int) -> tuple[list[Fetched], int]:
        """Those added after the first `num_read`, as far as they are kept, and how many were added in all."""
        with self._lock:
            num_new = min(self._num_added - num_read, len(self._kept))
            return list(islice(self._kept, len(self._kept) - num_new, None)), self._num_added

"""A limit on bytes per second: a pure token bucket, and the thin sleeper that applies it to a sender."""

from __future__ import annotations

import threading
import time

from kvstore.transfer.status import OverdueError

BURST_SECONDS = 0.01


class TokenBucket:
    """Tokens are bytes; they refill at `nbytes_per_second` up to `burst_nbytes`, and may be borrowed.

    Starts full. Who takes more than there is gets it, and is told how long to wait until the debt is paid.
    """

    def __init__(self, nbytes_per_second: float, burst_nbytes: float):
        if nbytes_per_second <= 0 or burst_nbytes <= 0:
            raise ValueError(f"rate {nbytes_per_second} and burst {burst_nbytes} must be positive")
        self._rate = nbytes_per_second
        self._burst_seconds = burst_nbytes / nbytes_per_second
        self._full_at = float("-inf")

    def take(self, nbytes: int, now: float) -> float:
        """Takes `nbytes` at time `now` (seconds); returns the seconds to wait before sending them."""
        self._full_at = max(self._full_at, now) + nbytes / self._rate
        return max(0.0, self._full_at - self._burst_seconds - now)


class Pacer:
    """One link's bucket, shared by all its senders."""

    def __init__(self, nbytes_per_second: float):
        burst = max(1.0, nbytes_per_second * BURST_SECONDS)
        self.chunk_nbytes = max(1, int(burst))
        self._bucket = TokenBucket(nbytes_per_second, burst)
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def pause(self, nbytes: int, deadline: float) -> None:
        """Blocks until `nbytes` may leave.

        Raises OverdueError if that is after `deadline` (monotonic seconds), ConnectionError if closed
        meanwhile.
        """
        now = time.monotonic()
        with self._lock:
            seconds = self._bucket.take(nbytes, now)
        if self._closed.wait(max(0.0, min(seconds, deadline - now))):
            raise ConnectionError("the engine was closed")
        if now + seconds > deadline:
            raise OverdueError("the rate limit left no time to send it")

    def close(self) -> None:
        """Wakes every sender that pauses."""
        self._closed.set()

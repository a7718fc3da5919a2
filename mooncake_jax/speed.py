"""How fast a worker has been lately, in tokens per second of work."""

from __future__ import annotations


class Speed:
    """A moving average over the last few pieces of work; idle time does not count."""

    def __init__(self, weight: float = 0.2):
        """`weight` (0 … 1] is the share of the newest piece."""
        self._weight = weight
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """One piece of work: `tokens` in `seconds`."""
        keep = 1.0 - self._weight
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """0.0 before the first piece."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

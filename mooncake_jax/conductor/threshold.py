"""`kvcache_balancing_threshold=auto`: the threshold that would have served the last requests best.

Beyond the paper, which leaves the value to the operator. For a sample of requests Algorithm 1 is run once per
candidate; what each would have forecast is summed up, older requests counting less. The forecasts use the transfer
rates that pairs of nodes really achieve, so the threshold rises when links get slow and falls when they recover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CANDIDATES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
DEFAULT = 2.0
_KEEP = 0.97  # of the sums, per request: the last 33 or so decide
_BETTER = 0.98  # a candidate must cost less than this share of the present one, so that noise moves nothing


class AutoThreshold:
    """The threshold in use, and each candidate's discounted cost."""

    def __init__(self) -> None:
        self.value = DEFAULT
        self._costs = [0.0] * len(CANDIDATES)

    def learn(self, ttft_seconds: Sequence[float]) -> None:
        """What one request's shortest TTFT would have been with each of `CANDIDATES`, in order."""
        if len(ttft_seconds) != len(CANDIDATES):
            raise ValueError(f"{len(ttft_seconds)} forecasts for {len(CANDIDATES)} candidates")
        self._costs = [
            _KEEP * cost + seconds for cost, seconds in zip(self._costs, ttft_seconds, strict=True)
        ]
        lowest = min(self._costs)
        present = self._costs[CANDIDATES.index(self.value)]
        if lowest < _BETTER * present:
            self.value = CANDIDATES[self._costs.index(lowest)]

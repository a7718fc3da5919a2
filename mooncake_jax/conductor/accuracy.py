"""Predicted against actual: how far the last forecasts of each kind were off, for metrics."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

import numpy as np

Kind = Literal["prefill", "ttft", "transfer", "tbt"]
KINDS: tuple[Kind, ...] = ("prefill", "ttft", "transfer", "tbt")
_NUM_KEPT = 512


class Accuracy:
    """The last 512 pairs of forecast and outcome, by kind."""

    def __init__(self) -> None:
        self._ratios: dict[Kind, deque[float]] = {kind: deque(maxlen=_NUM_KEPT) for kind in KINDS}
        self._counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)

    def add(self, kind: Kind, *, forecast_seconds: float, measured_seconds: float) -> None:
        """One outcome; pairs that are not both positive and finite say nothing."""
        if forecast_seconds > 0.0 and measured_seconds > 0.0 and math.isfinite(measured_seconds):
            self._ratios[kind].append(forecast_seconds / measured_seconds)
            self._counts[kind] += 1

    def summary(self) -> dict[str, float]:
        """Per kind that has any: how many outcomes ever, the median of forecast/measured, and the median and 95th
        percentile of |forecast - measured| / measured among the last ones."""
        figures: dict[str, float] = {}
        for kind, kept in self._ratios.items():
            if not kept:
                continue
            ratios = np.array(kept)
            errors = np.abs(ratios - 1.0)
            figures[f"forecast_{kind}_count"] = float(self._counts[kind])
            figures[f"forecast_{kind}_ratio_p50"] = float(np.median(ratios))
            figures[f"forecast_{kind}_error_p50"] = float(np.median(errors))
            figures[f"forecast_{kind}_error_p95"] = float(np.quantile(errors, 0.95))
        return figures

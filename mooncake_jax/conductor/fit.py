"""Fits the estimators to a profile: non-negative least squares of the relative error, and how good it came out.

Paper §4.1: prefill time is predicted "based on the request length and prefix_len … via a polynomial regression model
fitted on offline data".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from kvstore.errors import InvalidError


class PrefillPoint(NamedTuple):
    """A prompt of `num_tokens`, the first `num_prefix` of them reused, took `seconds`."""

    num_tokens: int
    num_prefix: int
    seconds: float


class DecodePoint(NamedTuple):
    """A step of `batch` requests that hold `kv_tokens` together took `seconds`."""

    batch: int
    kv_tokens: int
    seconds: float


class Fit(NamedTuple):
    """Coefficients of the columns of `prefill_columns` or `decode_columns`, none negative."""

    coefficients: np.ndarray

    def predict(self, columns: np.ndarray) -> np.ndarray:
        """`[N]` seconds for columns `[N, C]`."""
        return columns @ self.coefficients


class Quality(NamedTuple):
    """How predictions compare with what was measured."""

    r_squared: float
    error_p50: float  # of |predicted - measured| / measured
    error_p95: float
    num_points: int


def prefill_columns(points: Sequence[PrefillPoint]) -> np.ndarray:
    """`[N, 4]`: 1, computed tokens, (query, key) pairs, reused tokens."""
    n = np.array([point.num_tokens for point in points], np.float64)
    p = np.array([point.num_prefix for point in points], np.float64)
    return np.stack([np.ones_like(n), n - p, (n * n - p * p) / 2.0, p], axis=1)


def decode_columns(points: Sequence[DecodePoint]) -> np.ndarray:
    """`[N, 3]`: 1, further requests of the batch, tokens of KV."""
    batch = np.array([point.batch for point in points], np.float64)
    kv_tokens = np.array([point.kv_tokens for point in points], np.float64)
    return np.stack([np.ones_like(batch), batch - 1.0, kv_tokens], axis=1)


def fit_nonnegative(columns: np.ndarray, seconds: np.ndarray) -> Fit:
    """The coefficients ≥ 0 with the least sum of squared relative errors.

    Exact: the optimum is the plain least-squares solution on the columns it uses, so all sets of columns are tried (15
    for four). Raises InvalidError for fewer points than columns, or a time that is not positive.
    """
    num_points, num_columns = columns.shape
    if num_points < num_columns:
        raise InvalidError(f"fit: {num_points} points for {num_columns} coefficients; measure more")
    if not (np.isfinite(seconds).all() and (seconds > 0.0).all()):
        raise InvalidError("fit: every measured time must be positive")
    relative = columns / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    best, lowest = np.zeros(num_columns), np.inf
    for size in range(1, num_columns + 1):
        for chosen in map(list, combinations(range(num_columns), size)):
            solution = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(num_points), rcond=None)[
                0
            ]
            if (solution < 0.0).any():
                continue
            coefficients = np.zeros(num_columns)
            coefficients[chosen] = solution / scale[chosen]
            residual = float(np.square(relative @ coefficients - 1.0).sum())
            if residual < lowest:
                best, lowest = coefficients, residual
    return Fit(best)


def quality(predicted: np.ndarray, measured: np.ndarray) -> Quality:
    """Of `[N]` predictions against `[N]` measured seconds."""
    errors = np.abs(predicted - measured) / measured
    spread = float(np.square(measured - measured.mean()).sum())
    unexplained = float(np.square(measured - predicted).sum())
    return Quality(
        r_squared=1.0 - unexplained / spread if spread > 0.0 else 0.0,
        error_p50=float(np.quantile(errors, 0.5)),
        error_p95=float(np.quantile(errors, 0.95)),
        num_points=len(measured),
    )

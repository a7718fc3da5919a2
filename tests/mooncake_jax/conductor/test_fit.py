"""The fit finds what it is given, never goes below zero, and says how good it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidError
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.fit import (
    DecodePoint,
    PrefillPoint,
    decode_columns,
    fit_nonnegative,
    prefill_columns,
    quality,
)

SIZES = [(n, p) for n in (32, 100, 512, 2000, 4000) for p in (0, 16, n // 4, n // 2, n - 16)]


def test_a_polynomial_is_found_again():
    cost = CostModel(
        prefill_base_seconds=0.02,
        prefill_seconds_per_token=3e-4,
        prefill_seconds_per_pair=2e-7,
        prefill_seconds_per_prefix_token=5e-6,
    )
    points = [PrefillPoint(n, p, cost.prefill_seconds(n, float(p))) for n, p in SIZES]
    columns, seconds = prefill_columns(points), np.array([point.seconds for point in points])
    fit = fit_nonnegative(columns, seconds)
    assert fit.coefficients == pytest.approx([0.02, 3e-4, 2e-7, 5e-6], rel=1e-6)
    assert quality(fit.predict(columns), seconds).r_squared == pytest.approx(1.0)


def test_a_step_is_found_again():
    points = [
        DecodePoint(b, b * c, 0.01 + 2e-3 * (b - 1) + 1e-6 * b * c) for b in (1, 3, 8) for c in (64, 999)
    ]
    fit = fit_nonnegative(decode_columns(points), np.array([point.seconds for point in points]))
    assert fit.coefficients == pytest.approx([0.01, 2e-3, 1e-6], rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_other_non_negative_coefficients_are_better(seed):
    rng = np.random.default_rng(seed)
    columns = prefill_columns([PrefillPoint(n, p, 0.0) for n, p in SIZES])
    truth = rng.normal(size=4) * [0.05, 1e-4, 1e-7, 1e-5]  # some of them negative
    seconds = np.maximum(columns @ truth, 1e-3) * rng.uniform(0.8, 1.2, len(SIZES))
    fit = fit_nonnegative(columns, seconds)
    assert (fit.coefficients >= 0.0).all()

    def loss(coefficients):
        return np.square(columns @ coefficients / seconds - 1.0).sum()

    scale = 1.0 / (columns / seconds[:, None]).max(axis=0)
    for _ in range(100):
        other = np.maximum(fit.coefficients + rng.normal(size=4) * scale * rng.choice([1e-3, 0.1, 1.0]), 0.0)
        assert loss(other) >= loss(fit.coefficients) * (1 - 1e-9)


def test_errors_are_of_what_was_measured():
    got = quality(np.array([1.0, 2.2, 3.0]), np.array([1.0, 2.0, 4.0]))
    assert got.error_p50 == pytest.approx(0.1)
    assert got.error_p95 == pytest.approx(0.235)
    assert got.r_squared == pytest.approx(1 - 1.04 / (16 / 9 + 1 / 9 + 25 / 9))
    assert got.num_points == 3


def test_too_little_is_refused():
    columns = prefill_columns([PrefillPoint(10, 0, 0.0)] * 3)
    with pytest.raises(InvalidError, match="3 points for 4"):
        fit_nonnegative(columns, np.ones(3))
    with pytest.raises(InvalidError, match="positive"):
        fit_nonnegative(prefill_columns([PrefillPoint(10, 0, 0.0)] * 4), np.zeros(4))

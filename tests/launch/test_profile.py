"""The profile without a model: which points, how a slow phase is taken out, and that the Conductor can load it."""

import numpy as np
import pytest

from launch.profile import constants, measure, prefill_draws, prefill_grid, report
from mooncake_jax.conductor.fit import (
    DecodePoint,
    PrefillPoint,
    decode_columns,
    fit_nonnegative,
    prefill_columns,
)
from mooncake_jax.cost_model import CostModelFile

Z = 16


@pytest.mark.parametrize("points", [prefill_grid(1024, 6, Z), prefill_draws(1024, 50, Z, seed=3)])
def test_points_are_whole_blocks_of_prefix_and_something_to_compute(points):
    assert len(set(points)) == len(points) > 10
    assert all(32 <= n <= 1024 and 0 <= p < n and p % Z == 0 for n, p, _ in points)
    assert any(p > 0 for _, p, _ in points)


def test_a_slow_phase_is_taken_out():
    """The machine runs at half speed after the first hundred calls: the medians do not show it."""
    calls = 0

    def slow() -> float:
        nonlocal calls
        calls += 1
        return 2.0 if calls > 100 else 1.0

    points = [PrefillPoint(n, 0, 0.0) for n in (100, 200, 300)]
    got = measure(points, lambda p: p.num_tokens * slow(), lambda: 7.0 * slow(), repeats=21, label="test")
    ratios = [point.seconds / point.num_tokens for point in got]
    assert ratios == pytest.approx([ratios[0]] * 3)
    assert [point.num_tokens for point in got] == [100, 200, 300]


def test_what_is_written_is_what_the_conductor_loads(tmp_path):
    seen = [PrefillPoint(n, p, 0.02 + 1e-3 * (n - p) + 1e-6 * p) for n in (64, 256, 999) for p in (0, 32, 48)]
    steps = [DecodePoint(b, b * c, 0.01 + 2e-3 * (b - 1) + 1e-6 * b * c) for b in (1, 2, 4) for c in (64, 99)]
    prefill = fit_nonnegative(prefill_columns(seen), np.array([point.seconds for point in seen]))
    decode = fit_nonnegative(decode_columns(steps), np.array([point.seconds for point in steps]))
    assert "R² 1.0000, relative error p50 0.0%, p95 0.0%" in report("x", prefill, prefill_columns(seen), seen)
    values = constants(prefill, decode, (1e-3, 1e9), kv_nbytes=100.0, dram_nbytes=1e9, slots=1e4)
    path = tmp_path / "cost.json"
    CostModelFile("test", "measured", "by hand", values).write(path)
    cost = CostModelFile.load(path).costs.estimator()
    for n, p, seconds in seen:
        assert cost.prefill_seconds(n, float(p)) == pytest.approx(seconds, rel=1e-6)
    for batch, kv_tokens, seconds in steps:
        assert cost.tbt_seconds(batch, kv_tokens) == pytest.approx(seconds, rel=1e-6)
    assert cost.transfer_seconds(1e6) == pytest.approx(2e-3)

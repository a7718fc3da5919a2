"""Policies side by side: paired differences with their interval, arrivals drawn anew, rows that can fail."""

import math

import numpy as np
import pytest

from launch.replaying.outcome import Outcome
from launch.replaying.policies import difference, drawn_arrivals, figure
from launch.replaying.prompts import Line


def run_of(ttfts, status="ok") -> list[list[Outcome]]:
    return [
        [
            Outcome(i, 0.0, 0.0, status, 100, 1, ttft_seconds=float(ttft), cached_tokens=40)
            for i, ttft in enumerate(seed)
        ]
        for seed in ttfts
    ]


def test_a_difference_has_an_interval_around_it():
    rng = np.random.default_rng(1)
    base = rng.uniform(1.0, 9.0, (5, 40))
    mean, low, high = difference(run_of(base), run_of(base + rng.normal(0.5, 0.2, base.shape)))
    assert low < mean < high < 0.0
    assert mean == pytest.approx(-0.5, abs=0.05)
    assert high - low < 0.1  # paired: the spread of the requests themselves does not count
    mean, low, high = difference(run_of(base), run_of(base + rng.normal(0.0, 1.0, base.shape)))
    assert low < 0.0 < high
    assert all(map(math.isnan, difference(run_of(base), run_of(base, "rejected"))))


def test_arrivals_are_drawn_anew_in_order_over_the_same_span():
    sent = [Line(i, 2.0 * i, [i], 1) for i in range(50)]
    first, again, other = (drawn_arrivals(sent, seed, 98.0) for seed in (1, 1, 2))
    assert first == again != other
    times = [line.at_seconds for line in first]
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] <= 98.0
    assert [line.tokens for line in first] == [line.tokens for line in sent]


def test_rows_say_who_is_ahead():
    base = np.full((2, 10), 2.0)
    outcomes = {
        "global": run_of(base),
        "local": run_of(base / 1.02),
        "load": run_of(base + 1.0),
        "random": run_of(base - 1.0),
    }
    rows = {row.quantity: row for row in figure("t", "emulated", outcomes, ()).rows}
    assert next(row.ours for name, row in rows.items() if name.startswith("mean TTFT, load [")) == 3.0
    assert rows["prompt tokens reused, global"].ours == pytest.approx(40.0)
    assert rows["global < load, the interval clear of 0"].verdict == "inside"
    assert rows["global < random, the interval clear of 0"].verdict == "outside"
    assert rows["global / local"].verdict == "inside"

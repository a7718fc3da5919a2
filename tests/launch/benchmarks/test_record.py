"""The JSON contract of a suite, and how a ratio comes about."""

import json

import pytest

from launch.benchmarks.record import Machine, Row, Suite, measure

FIELDS = {"name", "unit", "better", "ours", "peer", "peer_name", "ratio", "ceiling", "rounds", "spread"}


def turns(*values):
    """A measurement that gives one value after the other."""
    left = iter(values)
    return lambda: next(left)


def test_the_ratio_is_the_median_of_the_rounds_ratios_after_a_round_that_warms():
    row = measure(
        "x", "GB/s", "higher", turns(99, 2, 4, 9), turns(1, 1, 4, 3), "them", rounds=3
    )  # ratios 2, 1, 3
    assert (row.ours, row.peer, row.ratio, row.peer_name, row.rounds) == (4, 3, 2, "them", 3)
    assert row.spread == pytest.approx(7 / 4)


def test_a_ratio_above_1_means_ahead_when_lower_is_better():
    assert measure("x", "µs", "lower", turns(9, 2), turns(9, 4), "them", rounds=1).ratio == 2


def test_the_file_has_every_field_of_the_contract_null_where_absent(tmp_path):
    path = tmp_path / "made" / "rows.json"
    Suite("store", Machine.here(), [Row("exists", "µs", "lower", 3.0)]).write(path)
    read = json.loads(path.read_text())
    assert set(read) == {"suite", "machine", "rows"}
    assert [set(row) for row in read["rows"]] == [FIELDS]
    assert read["rows"][0]["peer"] is read["rows"][0]["ratio"] is read["rows"][0]["ceiling"] is None


def test_a_short_run_is_repeated_and_the_last_one_counts():
    calls = []

    def run():
        calls.append(1)
        return float(len(calls))

    row = measure("x", "s", "lower", run, rounds=1, turn_seconds=0.02)
    assert len(calls) > 4
    assert row.ours == len(calls)

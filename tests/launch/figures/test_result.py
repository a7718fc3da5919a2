"""Gates, verdicts, ranges and tables of rows made by hand; the assumptions file."""

import csv
import math

import pytest

from kvstore.errors import InvalidError
from launch.figures.assumptions import Assumptions
from launch.figures.render import count, table, write_csv
from launch.figures.result import (
    HOLDS,
    REPORT,
    Expected,
    Figure,
    Panel,
    Series,
    at_least,
    at_most,
    between,
    factor,
    points,
    rows_of,
    within,
)


@pytest.mark.parametrize(
    ("gate", "paper", "inside", "outside"),
    [
        (within(0.1), 10.0, (9.0, 11.0), (8.9, 11.1)),
        (points(2.0), 10.0, (8.0, 12.0), (7.9, 12.1)),
        (factor(2.0), 10.0, (5.0, 20.0), (4.9, 21.0, -10.0)),
        (at_least(3.0), math.nan, (3.0, 9.0), (2.9,)),
        (at_most(3.0), math.nan, (3.0, -9.0), (3.1,)),
        (between(1.0, 2.0), math.nan, (1.0, 2.0), (0.9, 2.1)),
        (HOLDS, math.nan, (1.0,), (0.0,)),
    ],
)
def test_a_gate_says_inside_or_outside(gate, paper, inside, outside):
    def verdict(ours):
        (row,) = rows_of([Expected("q", "q", paper, gate)], {"q": ours})
        return row.verdict

    assert {verdict(ours) for ours in inside} == {"inside"}
    assert {verdict(ours) for ours in outside} == {"outside"}


def test_a_row_has_its_error_and_its_range_and_a_missing_value_no_row():
    expected = [Expected("a", "a", 2.0, REPORT, "s"), Expected("gone", "gone", 1.0, REPORT)]
    (row,) = rows_of(expected, {"a": 3.0}, [{"a": 5.0}, {"a": 2.5}, {"b": 0.0}])
    assert (row.error, row.low, row.high, row.verdict) == (0.5, 2.5, 5.0, "report")


def figure():
    expected = [
        Expected("time", "time", 2.0, within(0.1), "s"),
        Expected("order", "order", math.nan, HOLDS),
        Expected("other", "other", 4.0, REPORT),
    ]
    rows = rows_of(expected, {"time": 2.1, "order": 0.0, "other": 4000.0}, [{"time": 1.9}])
    panel = Panel(
        "p", "x", "y", [Series("ours", [1, 2], [3.0, 4.5], "simulated"), Series("ours", [1], [3.5], "paper")]
    )
    return Figure("a figure", "simulated", rows, [panel])


def test_the_table_says_everything():
    lines = table(figure()).splitlines()[2:]
    assert lines == [
        "| time | 2 s | 2.1 s | +5.0% | ±10% | inside | 1.9 s – 2.1 s |",
        "| order | – | no | – | holds | outside | – |",
        "| other | 4 | 4000 | +99900.0% | not gated | report | – |",
    ]
    assert count([figure()]) == (1, 1, 1)


def test_the_curves_are_a_csv_file(tmp_path):
    write_csv(tmp_path / "f.csv", figure())
    rows = list(csv.reader((tmp_path / "f.csv").read_text().splitlines()))
    assert rows[0] == ["panel", "series", "source", "x", "y"]
    assert rows[1:] == [
        ["p", "ours", "simulated", "1", "3"],
        ["p", "ours", "simulated", "2", "4.5"],
        ["p", "ours", "paper", "1", "3.5"],
    ]


def test_assumptions_vary_one_thing_at_a_time():
    assumptions = Assumptions.load()
    variants = list(assumptions.variants(("discipline", "dispatch")))
    assert [(v.discipline, v.dispatch) for v in variants] == [
        ("fifo", "fewest"),
        ("batch", "round_robin"),
        ("batch", "random"),
    ]
    assert all(value in assumptions.ranges[name] for name, value in _chosen(assumptions))


def _chosen(assumptions):
    return [(name, getattr(assumptions.chosen, name)) for name in assumptions.ranges]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("8\n", '"eight"\n'), "prefill_nodes"),
        (('"fifo", "batch"', '"fifo", "lifo"'), "discipline"),
        (("[seed]", "[speed]"), "speed|seed"),
        (('why = "ties', 'because = "ties'), "because|why"),
    ],
)
def test_a_broken_assumptions_file_is_an_error(tmp_path, change, message):
    from launch.figures.assumptions import FILE

    path = tmp_path / "assumptions.toml"
    path.write_text(FILE.read_text().replace(*change, 1))
    with pytest.raises(InvalidError, match=message):
        Assumptions.load(path)

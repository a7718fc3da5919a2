"""Every arrival counts once, and the figures are those of a short list done by hand."""

import csv

import pytest

from launch.replaying.outcome import Outcome, Slo, plotted, summarize, write_csv
from launch.replaying.targets import Tokens

ANSWERED = [
    Outcome(0, 0.0, 0.0, "ok", 100, 5, ttft_seconds=1.0, mean_tbt_seconds=0.1, cached_tokens=50),
    Outcome(1, 1.0, 0.2, "ok", 300, 5, ttft_seconds=3.0, mean_tbt_seconds=0.1, cached_tokens=0),
    Outcome(2, 2.0, 0.0, "ok", 100, 1, ttft_seconds=2.0, cached_tokens=50),
]
OTHERS = [
    Outcome(3, 3.0, 0.0, "rejected", 100, retry_after_seconds=2.0),
    Outcome(4, 3.0, 0.0, "rejected", 100),
    Outcome(5, 3.0, 0.0, "failed", 100, error="gone"),
]


def test_a_summary_by_hand():
    got = summarize([*ANSWERED, *OTHERS], Slo(ttft_seconds=2.5, tbt_seconds=0.2))
    assert (got.num_arrivals, got.num_ok, got.num_rejected, got.num_failed) == (6, 3, 2, 1)
    assert (got.num_within_slo, got.goodput) == (2, pytest.approx(2 / 6))
    assert (got.ttft_mean, got.ttft_p50) == (2.0, 2.0)
    assert got.cached_share == pytest.approx(100 / 500)
    assert (got.lag_max, got.retry_after_missing) == (0.2, 1)
    assert "6: 3 answered, 2 rejected (429, of which 1 without Retry-After), 1 failed" in got.text()


def test_nothing_at_all_is_no_error():
    assert summarize([], Slo()).goodput == 0.0
    assert "not told" in summarize(OTHERS, Slo()).text()


def test_token_times():
    tokens = Tokens(sent=10.0)
    assert tokens.fill(OTHERS[0]).ttft_seconds == -1.0
    for num, now in ((1, 11.0), (0, 11.5), (2, 12.0), (1, 15.0)):
        tokens.add(num, now)
    got = tokens.fill(OTHERS[0])
    assert (got.ttft_seconds, got.output_tokens, got.longest_gap_seconds) == (1.0, 4, 3.0)
    assert got.mean_tbt_seconds == pytest.approx(4 / 3)
    assert tokens.fill(OTHERS[0], 9).mean_tbt_seconds == pytest.approx(0.5)


def test_a_csv_has_a_line_per_arrival(tmp_path):
    path = tmp_path / "deep" / "replay.csv"
    write_csv(path, [*OTHERS, *ANSWERED])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["index"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert (rows[1]["ttft_seconds"], rows[5]["error"]) == ("3.0", "gone")


def test_a_plot_has_what_was_answered_and_what_was_not():
    outcomes = [
        Outcome(0, 2.0, 0.0, "ok", 8, 3, ttft_seconds=0.5, mean_tbt_seconds=0.1),
        Outcome(1, 1.0, 0.0, "ok", 8, 3, ttft_seconds=0.25, mean_tbt_seconds=0.2),
        Outcome(2, 3.0, 0.0, "rejected", 8),
        Outcome(3, 4.0, 0.0, "rejected", 8),
    ]
    ttft, tbt, lost = plotted(outcomes, "t").panels
    assert (ttft.series[0].x, ttft.series[0].y) == ([1.0, 2.0], [0.25, 0.5])
    assert tbt.series[0].y == [0.2, 0.1]
    assert [(one.name, one.x, one.y) for one in lost.series] == [
        ("rejected", [3.0, 4.0], [1, 2]),
        ("failed", [], []),
    ]

"""Overload: the rate that is 1×, the SLO that is fair, and every verdict."""

import numpy as np
import pytest

from launch.replaying.outcome import Outcome, Slo
from launch.replaying.overload import Shape, fair_slo, find_rate, poisson, recovery_seconds, rows

SLO = Slo(1.0, 0.1)
SHAPE = Shape(16, 2, 50)


def ok(at=0.0, ttft=0.5, tbt=0.05) -> Outcome:
    return Outcome(0, at, 0.0, "ok", 16, 2, ttft_seconds=ttft, mean_tbt_seconds=tbt)


def refused(at=0.0, retry=1.0) -> Outcome:
    return Outcome(0, at, 0.0, "rejected", 16, retry_after_seconds=retry)


def test_arrivals_are_in_their_span_and_prompts_differ():
    lines = poisson(20.0, 5.0, 10.0, SHAPE, np.random.default_rng(3))
    assert 150 < len(lines) < 250
    assert [line.at_seconds for line in lines] == sorted(line.at_seconds for line in lines)
    assert 5.0 <= lines[0].at_seconds <= lines[-1].at_seconds <= 15.0
    assert len({tuple(line.tokens) for line in lines}) == len(lines)
    assert {len(line.tokens) for line in lines} == {16}


def test_a_fair_slo_is_four_medians():
    slo = fair_slo([ok(ttft=0.1), ok(ttft=0.2), ok(ttft=9.0)])
    assert (slo.ttft_seconds, slo.tbt_seconds) == (pytest.approx(0.8), pytest.approx(0.2))
    with pytest.raises(ValueError, match="failed"):
        fair_slo([ok(), refused()])


@pytest.mark.parametrize("limit", [0.4, 1.0, 6.5, 100.0])
def test_the_highest_rate_that_holds_is_found(limit):
    def send(rate):
        late = 0 if rate <= limit else 20
        return [ok()] * (100 - late) + [ok(ttft=2.0)] * late

    assert limit / 1.1 < find_rate(send, SLO, 1.0) <= limit


def test_a_rate_that_never_holds_is_an_error():
    with pytest.raises(ValueError, match="do not meet"):
        find_rate(lambda rate: [ok(ttft=2.0)], SLO, 1.0)


def test_recovery_ends_with_the_last_arrival_that_was_not_served():
    outcomes = [refused(59.0), refused(61.0), ok(62.0), ok(63.5, ttft=2.0), ok(70.0)]
    assert recovery_seconds(outcomes, SLO, 60.0) == 3.5
    assert recovery_seconds(outcomes[:1] + outcomes[-1:], SLO, 60.0) == 0.0


def verdicts(overload) -> dict[str, str]:
    once = [ok(i / 10.0) for i in range(1, 101)]  # 10 a second, all good
    return {row.quantity: row.verdict for row in rows(once, overload, SLO, 10.0, 60.0)}


def test_every_verdict_can_fail():
    good = [ok(i / 10.0) for i in range(600)] + [refused(i / 10.0) for i in range(600)] + [ok(61.0)]
    assert "outside" not in verdicts(good).values()
    bad = verdicts([*good, refused(5.0, retry=-1.0)])
    assert bad["429s without Retry-After"] == "outside"
    slow = verdicts([*good, *(ok(1.0, ttft=2.0) for _ in range(40))])
    assert slow["of the accepted, within both SLOs"] == "outside"
    few = verdicts(good[:500] + good[600:])
    assert few["goodput under overload / at 1×"] == "outside"
    late = verdicts([*good, refused(75.0)])
    assert late["recovery"] == "outside"
    failed = verdicts([*good, Outcome(0, 1.0, 0.0, "failed", 16)])
    assert failed["failed"] == "outside"

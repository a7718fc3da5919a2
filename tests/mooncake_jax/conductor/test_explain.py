"""Every decision can be asked for its reasons, and they are the ones it was made from."""

import logging

import pytest

from kvstore.errors import InvalidError, NotFoundError, RefusedError
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.explain import explain, table

PREFIX = list(range(1600))


def explained(cluster, request_id):
    return explain(cluster.config.schedule, cluster.log.records(), request_id)


def test_a_placement_tells_why_the_others_lost(make_cluster):
    cluster = make_cluster(prefill=3, decode=2)
    cluster.hold("p0-home", PREFIX)
    cluster.beat("p0", queued_tokens=900, used_slots=1, tokens_per_second=1000.0, request_ids=["x"])
    cluster.register("p1", epoch=2, max_tokens=100)
    cluster.beat("d0", used_slots=3, request_ids=["x", "y", "z"])
    placement = cluster.place([*PREFIX, 7], request_id="r")
    cluster.place([1, 2, 3], request_id="later")
    got = explained(cluster, "r")
    assert (got.outcome, got.policy, got.best_blocks, got.holder) == ("placed", "global", 100, "p0-home")
    p0, p1, p2 = got.prefill
    assert placement.prefill.name == "p2"
    assert (p0.own_blocks, p0.fetches, p0.queue_seconds) == (100, False, pytest.approx(0.9))
    assert p0.verdict.endswith("s later")
    assert p1.verdict == "holds prompts of up to 100 tokens"
    assert (p2.own_blocks, p2.fetches, p2.verdict) == (0, True, "chosen")
    ttft = p2.transfer_seconds + p2.queue_seconds + p2.prefill_seconds
    assert ttft == pytest.approx(placement.ttft_forecast_seconds)
    assert float(p0.verdict.split()[0]) == pytest.approx(0.9 + p0.prefill_seconds - ttft, abs=1e-3)
    d0, d1 = got.decode
    assert (d0.verdict, d1.verdict) == ("more loaded", "chosen")
    assert d1.tbt_seconds == pytest.approx(placement.tbt_forecast_seconds)
    shown = table(got)
    assert "r: placed, policy global, threshold 2" in shown
    assert all(name in shown for name in ("p0", "p1", "p2", "d0", "d1", "chosen"))


def test_refusals_are_explained_too(make_cluster):
    cluster = make_cluster(prefill=1, decode=1, schedule=ScheduleConfig(max_waiting_prompts=0))
    cluster.beat("p0", used_slots=8, request_ids=[str(i) for i in range(8)])
    with pytest.raises(RefusedError):
        cluster.place(PREFIX, request_id="r")
    got = explained(cluster, "r")
    assert got.outcome == "prefill_full"
    assert got.prefill[0].verdict == "queue full with 8 requests"
    assert "retry after" in table(got)
    with pytest.raises(InvalidError):
        cluster.place(range(5000), request_id="long")
    assert explained(cluster, "long").prefill[0].verdict == "holds prompts of up to 4096 tokens"


def test_ties_and_the_avoided_say_so(make_cluster):
    cluster = make_cluster(prefill=3, decode=1)
    cluster.place([1, 2, 3], request_id="r", avoid=["p1"])
    verdicts = sorted(one.verdict for one in explained(cluster, "r").prefill)
    assert verdicts == ["as good; the draw was for another", "avoided: it just failed this request", "chosen"]


def test_the_last_decision_on_an_id_counts_and_others_are_not_found(make_cluster):
    cluster = make_cluster(num_logged_decisions=2)
    first = cluster.place([1, 2, 3], request_id="r")
    again = cluster.place([1, 2, 3], request_id="r", avoid=[first.prefill.name])
    chosen = [one.name for one in explained(cluster, "r").prefill if one.verdict == "chosen"]
    assert chosen == [again.prefill.name]
    cluster.place([1], request_id="s")
    cluster.place([1], request_id="t")
    with pytest.raises(NotFoundError, match="'r'"):
        explained(cluster, "r")


def test_the_debug_log_has_it(make_cluster, caplog):
    cluster = make_cluster()
    with caplog.at_level(logging.DEBUG, logger="mooncake_jax.conductor.conductor"):
        cluster.place([1, 2, 3], request_id="r")
    assert "r: placed" in caplog.text
    assert "chosen" in caplog.text

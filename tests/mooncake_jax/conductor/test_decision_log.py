"""A log is enough to decide again: from the ring, from a file, after the file started afresh."""

import contextlib
import math
import os
import random

import msgspec
import pytest

from kvstore.errors import InvalidError, RefusedError
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision_log import (
    DecisionLog,
    DecisionRecord,
    EndRecord,
    read_decision_log,
    read_log,
    replay,
)
from mooncake_jax.conductor.view import Changes


def busy_hour(cluster, num_requests=120, seed=5) -> list:
    """Arrivals, ends, heartbeats and a restart; returns the decisions in order."""
    rng = random.Random(seed)
    decided, placed = [], []
    for i in range(num_requests):
        cluster.now += rng.random() * 0.2
        tokens = [*range(rng.choice([64, 320, 640])), 9000 + i]
        with contextlib.suppress(RefusedError):
            placed.append(cluster.place(tokens))
        decided.append(cluster.log.records()[-1].decision)
        if placed and rng.random() < 0.6:
            placement = placed.pop(0)
            cluster.hold(f"{placement.prefill.name}-home", tokens)
            cluster.end(placement.request_id, ok=rng.random() < 0.8)
        if i == 60:
            cluster.register("p1", epoch=2)
        elif i % 7 == 0:
            cluster.beat("p0", queued_tokens=rng.randrange(500), tokens_per_second=1000.0)
    return decided


def test_the_ring_replays_even_when_its_beginning_is_lost(make_cluster):
    schedule = ScheduleConfig(ttft_slo_seconds=3.0)
    cluster = make_cluster(prefill=3, schedule=schedule, num_logged_decisions=25)
    decided = busy_hour(cluster)
    records = cluster.log.records()
    assert len(records) == 25
    assert [record.decision for record in records] == decided[-25:]
    assert {record.decision.outcome for record in records} >= {"placed"}
    again = [decision for _, decision in replay(schedule, records)]
    assert again == decided[-25:]


def test_replay_depends_on_the_view(make_cluster):
    cluster = make_cluster(prefill=3)
    busy_hour(cluster)
    records = cluster.log.records()
    frozen = [msgspec.structs.replace(record, changes=Changes([], [])) for record in records[1:]]
    without = [decision for _, decision in replay(cluster.config.schedule, records[:1] + frozen)]
    assert without != [record.decision for record in records]


@pytest.mark.parametrize("threshold", [2.0, math.inf])
def test_a_file_replays(make_cluster, tmp_path, threshold):
    path = tmp_path / "decisions.jsonl"
    schedule = ScheduleConfig(balancing_threshold=threshold)
    cluster = make_cluster(schedule=schedule)
    cluster.conductor.log = cluster.log = DecisionLog(schedule, num_records=4, path=str(path))
    decided = busy_hour(cluster)
    cluster.log.close()
    config, records = read_decision_log(path)
    assert config == schedule
    assert [decision for _, decision in replay(config, records)] == decided


def test_a_file_that_grew_too_long_starts_afresh_and_replays(make_cluster, tmp_path):
    path = tmp_path / "decisions.jsonl"
    cluster = make_cluster()
    log = DecisionLog(cluster.config.schedule, num_records=4, path=str(path), max_nbytes=20_000)
    cluster.conductor.log = cluster.log = log
    decided = busy_hour(cluster)
    log.close()
    assert (tmp_path / "decisions.jsonl.1").stat().st_size < 30_000
    config, records = read_decision_log(path)
    assert 0 < len(records) < len(decided)
    assert [decision for _, decision in replay(config, records)] == decided[-len(records) :]


def test_an_older_file_is_kept(tmp_path):
    path = tmp_path / "decisions.jsonl"
    for _ in range(2):
        DecisionLog(ScheduleConfig(), num_records=4, path=str(path)).close()
    assert (tmp_path / "decisions.jsonl.1").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("text", "line"), [("", "empty"), ("{}\n{oops\n", "line 2"), ("[]\n", "line 1")])
def test_a_broken_file_is_told_by_line(tmp_path, text, line):
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InvalidError, match=line):
        read_decision_log(path)


def test_a_full_disk_ends_the_file_and_nothing_else(make_cluster, caplog):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full, a file on a full disk")
    cluster = make_cluster(prefill=3, num_logged_decisions=200)
    cluster.log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    assert len(busy_hour(cluster)) == 120
    assert "placing goes on" in caplog.text
    assert len(cluster.log.records()) == 120


def test_a_file_also_tells_when_phases_ended(make_cluster, tmp_path):
    path = tmp_path / "decisions.jsonl"
    cluster = make_cluster()
    log = DecisionLog(cluster.config.schedule, num_records=4, path=str(path))
    cluster.conductor.log = cluster.log = log
    first, second = cluster.place(range(64)), cluster.place(range(100, 164))
    cluster.now += 2.0
    cluster.end(second.request_id, "prefill", seconds=1.5)
    cluster.end(first.request_id)
    log.close()
    _, records = read_log(path)
    assert [type(record) for record in records] == [DecisionRecord, DecisionRecord, EndRecord, EndRecord]
    assert [record.end.request_id for record in records[2:]] == [second.request_id, first.request_id]
    assert records[2].end.seconds == 1.5
    assert records[2].now == cluster.now

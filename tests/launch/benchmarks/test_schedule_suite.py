"""Suite `schedule` on a small index, beside a made-up router: its rows, and that what it measures decides."""

import pytest

from launch.benchmarks import schedule
from launch.benchmarks.options import Options
from launch.benchmarks.schedule import Load, Pool, schedule_rows

TINY = Load(num_indexed=2000, num_calls=2, num_prompts=20, num_hashes=1)
NAMES = ["decide_16", "decide_128", "decide_1024", "schedule_small_16", "schedule_small_256"]


class FakePeer:
    """A router that finds 20 chains in 1 s and hashes in 2 s."""

    name = "fake"

    def store(self, chains, num_workers):
        assert len(chains) == TINY.num_prompts
        assert num_workers == 16

    def find_seconds(self):
        return 1.0

    def hash_seconds(self, tokens, block_tokens, count):
        assert (len(tokens), block_tokens, count) == (32_768, 256, TINY.num_hashes)
        return 2.0


def test_rows_and_units():
    rows = {row.name: row for row in schedule_rows(Options(True, None, "", ()), TINY, FakePeer())}
    assert list(rows) == [*NAMES, "find_prefix", "hash_32k"]
    assert {(row.unit, row.better) for row in rows.values()} == {("µs", "lower")}
    assert all(row.ours > 0 for row in rows.values())
    assert all(rows[name].peer is None for name in NAMES)
    assert rows["find_prefix"].peer == pytest.approx(1e6 / TINY.num_prompts)
    assert rows["hash_32k"].peer == pytest.approx(2e6)


def test_what_is_measured_is_a_placement():
    pool = Pool(16, 4000)
    held = pool.index.lengths(pool.keys)
    decided = pool.conductor.decide(pool.request, pool.keys, held, now=0.0)
    assert 4000 - len(pool.keys) < len(pool.index) <= 4000
    assert decided.decision.outcome == "placed"
    assert decided.lengths.best == max(held.values()) > 0
    assert pool.schedule_small()().outcome == "placed"
    assert pool.conductor.books["bookings"] == 0


def test_every_decision_is_over_as_many_instances_as_its_name_says():
    assert [len(Pool(num, 0).conductor.view.prefill.names) for num in schedule.CLUSTERS] == [16, 128, 1024]

"""Recordings of runs: blocks by number, files that come back, decisions that agree or are told apart."""

import pytest

from kvstore.errors import InvalidError
from launch.replaying.prompts import Line
from launch.replaying.recorded import RecordedArrival, Recording, block_chains, compare, figure
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, RequestFeatures
from mooncake_jax.conductor.decision_log import DecisionRecord, EndRecord
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.view import Changes, DecodeRow, PrefillRow
from mooncake_jax.messages import RequestEnd

CONFIG = ScheduleConfig(cost=CostModel(prefill_base_seconds=0.0, prefill_seconds_per_pair=0.0))
Z = 100


def recorded(number, now, chain, prefill, busy_until=(0.0, 0.0)):
    """A decision for `prefill`, made from queues until `busy_until`."""
    rows = [PrefillRow(f"p{i}", True, 10_000, 1, 0, until, 1.0) for i, until in enumerate(busy_until)]
    changes = Changes(list(enumerate(rows)), [(0, DecodeRow("d0", True, 10_000, 8, 0, 0, 0, 100_000))])
    decision = Decision("placed", prefill, 0)
    features = RequestFeatures(len(chain) * Z + 1, 4, Z, 1000)
    record = DecisionRecord(
        f"r{number}", now, number, changes, features, [0, 0], 0, "", None, None, 0, 2.0, (0.0, 0.0), decision
    )
    return RecordedArrival(record, list(chain))


def recording(*events):
    return Recording(CONFIG, 1000, list(events))


def test_decisions_from_rebuilt_queues_are_alike():
    first = recorded(0, 0.0, range(5), 0)
    while_it_runs = recorded(1, 0.1, range(10, 15), 1, busy_until=(0.5, 0.0))
    end = EndRecord(0.5, RequestEnd("r0", "prefill", True, 0.5))
    after_it = recorded(2, 0.51, range(20, 25), 0, busy_until=(0.5, 0.6))
    assert compare(recording(first, while_it_runs, end, after_it)).differences == {}


def test_a_queue_that_only_the_log_knows_of_is_named():
    comparison = compare(recording(recorded(0, 0.0, range(5), 1, busy_until=(3.0, 0.0))))
    assert comparison.differences == {0: "queue"}
    assert comparison.same_percent == 0.0
    rows = {row.quantity: row.verdict for row in figure("t", "emulated", comparison).rows}
    assert (rows["decided alike"], rows["every difference is explained"]) == ("outside", "inside")


def test_a_decision_that_nothing_leads_to_is_unexplained():
    comparison = compare(recording(recorded(0, 0.0, range(5), 1, busy_until=(0.0, 3.0))))
    assert comparison.differences == {0: "unexplained"}


def test_a_file_comes_back_and_a_broken_one_is_told_by_line(tmp_path):
    one, path = recording(recorded(0, 0.0, range(5), 0), recorded(1, 1.0, [], 1)), tmp_path / "r.jsonl"
    one.write(path)
    assert Recording.read(path) == one
    path.write_bytes(path.read_bytes() + b"{oops\n")
    with pytest.raises(InvalidError, match="line 4"):
        Recording.read(path)
    with pytest.raises(InvalidError, match="no decision"):
        compare(recording())


def test_equal_blocks_of_prompts_get_equal_numbers():
    sent = [Line(3, 0.0, [1, 2, 3, 4, 5], 1), Line(4, 0.0, [1, 2, 9, 9], 1), Line(7, 0.0, [1], 1)]
    assert block_chains(sent, 2) == {3: [0, 1], 4: [0, 2], 7: []}

"""The books of a recorded run, rebuilt from arrivals and completions: numbers that a person can do."""

import pytest

from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, RequestFeatures
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.messages import RequestEnd
from mooncake_jax.simulation.rebuilt import Arrival, Rebuilt

COST = CostModel(
    prefill_base_seconds=0.0,
    prefill_seconds_per_token=1e-3,
    prefill_seconds_per_pair=0.0,
    prefill_seconds_per_prefix_token=0.0,
)
Z = 100


@pytest.fixture
def rebuilt():
    return Rebuilt(
        ScheduleConfig(cost=COST, balancing_threshold=float("inf")),
        num_prefill=2,
        num_decode=2,
        decode_slots=8,
        decode_tokens=100_000,
        dram_blocks=1000,
    )


def arrival(name, now, chain, draws=(0.0, 0.0)):
    return Arrival(name, now, RequestFeatures(len(chain) * Z + 1, 10, Z, 1000), chain, draws)


def place(rebuilt, one, prefill, decode=0):
    """As recorded: at these instances."""
    _, lengths, _ = rebuilt.decide(one)
    rebuilt.placed(one, lengths, Decision("placed", prefill, decode))


def queues(rebuilt, now):
    return [max(until - now, 0.0) for until in rebuilt.books.view().prefill.busy_until.tolist()]


def test_a_queue_is_the_forecasts_of_what_was_placed_less_what_has_passed(rebuilt):
    place(rebuilt, arrival("a", 10.0, range(10)), 0)
    place(rebuilt, arrival("b", 10.5, range(100, 120)), 0)
    assert queues(rebuilt, 10.5) == pytest.approx([0.501 + 2.001, 0.0])
    rebuilt.ended(RequestEnd("a", "prefill", True, 1.001), 11.2)  # later than forecast
    assert queues(rebuilt, 11.2) == pytest.approx([2.001, 0.0])
    assert queues(rebuilt, 12.2) == pytest.approx([1.001, 0.0])
    rebuilt.ended(RequestEnd("b", "prefill", True, 2.001), 12.5)
    assert queues(rebuilt, 12.5) == [0.0, 0.0]
    assert not rebuilt.books.view().prefill.num_requests.any()


def test_one_that_overtakes_leaves_the_queue_as_long_as_the_other(rebuilt):
    place(rebuilt, arrival("a", 0.0, range(10)), 0)
    place(rebuilt, arrival("b", 0.0, range(100, 110)), 0)
    rebuilt.ended(RequestEnd("b", "prefill", True, 1.001), 1.001)
    assert queues(rebuilt, 1.001) == pytest.approx([1.001, 0.0])


def test_blocks_that_are_booked_draw_the_next_request_and_the_load_of_decode_repels_it(rebuilt):
    place(rebuilt, arrival("a", 0.0, range(10)), 1, decode=0)
    decision, lengths, _ = rebuilt.decide(arrival("b", 0.1, range(10)))
    assert (decision.prefill, decision.decode) == (1, 1)
    assert (lengths.local.tolist(), lengths.best) == ([0, 10], 0)  # no source before it is computed
    rebuilt.ended(RequestEnd("a", "prefill", True, 1.001), 1.0)
    assert rebuilt.decide(arrival("c", 1.0, range(10)))[1].best == 10


def test_paces_are_learned_and_bookings_end(rebuilt):
    place(rebuilt, arrival("a", 0.0, range(10)), 0)
    rebuilt.ended(RequestEnd("a", "prefill", True, 2.002), 2.002)
    assert rebuilt.books.view().prefill.factor.tolist() == pytest.approx([2**0.1, 1.0])
    rebuilt.ended(RequestEnd("a", "decode", True, 0.5), 3.0)
    rebuilt.ended(RequestEnd("a", "all", True, 0.5), 3.0)  # known to be over
    view = rebuilt.books.view()
    for column in (view.decode.num_requests, view.decode.kv_tokens, view.decode.committed_tokens):
        assert not column.any()


def test_a_failure_ends_both_phases_and_teaches_nothing(rebuilt):
    place(rebuilt, arrival("a", 0.0, range(10)), 0)
    rebuilt.ended(RequestEnd("a", "all", False, 9.0), 9.0)
    view = rebuilt.books.view()
    assert view.prefill.factor.tolist() == [1.0, 1.0]
    assert not view.prefill.num_requests.any()
    assert not view.decode.num_requests.any()

"""Algorithm 1: arrays against a literal transcription of the paper's lines, and the edges it leaves open."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, Link, PrefixLengths, RequestFeatures
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.schedule import schedule
from mooncake_jax.conductor.view import ClusterView, DecodeRow, PrefillRow

NOW = 100.0
Z = 16
COST = CostModel(
    prefill_base_seconds=0.0,
    prefill_seconds_per_token=1e-3,
    prefill_seconds_per_pair=0.0,
    prefill_seconds_per_prefix_token=0.0,
    transfer_base_seconds=0.0,
    transfer_nbytes_per_second=1e6,
    tbt_base_seconds=0.01,
    tbt_seconds_per_request=0.01,
    tbt_seconds_per_kv_token=0.0,
)


def prefill_row(name="p", queue_seconds=0.0, **changes) -> PrefillRow:
    fields = {
        "name": name,
        "alive": True,
        "max_tokens": 4096,
        "num_slots": 4,
        "num_requests": 0,
        "busy_until": NOW + queue_seconds,
        "factor": 1.0,
    }
    return PrefillRow(**{**fields, **changes})


def decode_row(name="d", **changes) -> DecodeRow:
    fields = {
        "name": name,
        "alive": True,
        "max_tokens": 4096,
        "num_slots": 4,
        "num_requests": 0,
        "kv_tokens": 0,
        "committed_tokens": 0,
        "capacity_tokens": 16384,
    }
    return DecodeRow(**{**fields, **changes})


def cluster(prefill: list[PrefillRow], decode: list[DecodeRow]) -> ClusterView:
    view = ClusterView()
    for slot, row in enumerate(prefill):
        view.put_prefill(slot, row)
    for slot, row in enumerate(decode):
        view.put_decode(slot, row)
    return view


def request(num_tokens=320, max_tokens=32, block_nbytes=1000, **changes) -> RequestFeatures:
    return RequestFeatures(
        num_tokens=num_tokens, max_tokens=max_tokens, block_tokens=Z, block_nbytes=block_nbytes, **changes
    )


def lengths(*local: int, best: int | None = None) -> PrefixLengths:
    best = max(local) if best is None else best
    return PrefixLengths(np.array(local, np.int64), best, "elsewhere" if best else "")


def decide(view, features, match, draws=(0.0, 0.0), **config) -> Decision:
    return schedule(view, features, match, ScheduleConfig(cost=COST, **config), now=NOW, draws=draws)


def ratio(best_len: int, prefix_len: int) -> float:
    if prefix_len:
        return best_len / prefix_len
    return math.inf if best_len else 1.0


class Instance:
    """One prefill instance as the paper's lines name it."""

    def __init__(
        self, slot: int, row: PrefillRow, prefix_len: int, match: PrefixLengths, config: ScheduleConfig
    ):
        self.slot, self.row, self.prefix_len, self.config = slot, row, prefix_len, config
        per_instance = [np.broadcast_to(part, match.local.shape)[slot] for part in match.link or ()]
        self.start_seconds, self.seconds_per_nbyte = per_instance or [
            config.cost.transfer_base_seconds,
            1 / config.cost.transfer_nbytes_per_second,
        ]

    def transfer_time(self, nbytes: float) -> float:
        return self.start_seconds + nbytes * self.seconds_per_nbyte

    def queue_time(self) -> float:
        return max(self.row.busy_until - NOW, 0.0)

    def prefill_time(self, num_tokens: int, p: int) -> float:
        cost, n = self.config.cost, num_tokens - p
        return self.row.factor * (
            cost.prefill_base_seconds
            + cost.prefill_seconds_per_token * n
            + cost.prefill_seconds_per_pair * (n * p + n * n / 2)
            + cost.prefill_seconds_per_prefix_token * p
        )


def literal_algorithm1(view: ClusterView, r: RequestFeatures, match: PrefixLengths, config: ScheduleConfig):
    """The paper's lines one by one; returns the lowest TTFT and what each instance would cost and fetch."""
    usable = (r.num_tokens - 1) // r.block_tokens
    instances = [
        Instance(slot, row, min(int(match.local[slot]), usable), match, config)
        for slot, row in enumerate(view.prefill_rows())
        if row.alive
        and row.max_tokens >= r.num_tokens
        and row.num_requests < row.num_slots + config.max_waiting_prompts
    ]
    ttft, p = math.inf, None  # 2
    best_len = min(match.best, usable)  # 3
    costs = {}
    for instance in instances:  # 4
        fetches = (
            ratio(best_len, instance.prefix_len) > config.balancing_threshold
            and best_len > instance.prefix_len
        )
        if fetches:  # 5
            prefix_len = best_len  # 6
            transfer_len = best_len - instance.prefix_len  # 7
            t_transfer = instance.transfer_time(float(transfer_len * r.block_nbytes))  # 8
        else:
            prefix_len = instance.prefix_len  # 10
            t_transfer = 0.0  # 11
        t_queue = instance.queue_time()  # 12
        t_prefill = instance.prefill_time(r.num_tokens, prefix_len * r.block_tokens)  # 13
        costs[instance.slot] = (t_transfer + t_queue + t_prefill, best_len if fetches else 0)
        if ttft > t_transfer + t_queue + t_prefill:  # 14
            ttft = t_transfer + t_queue + t_prefill  # 15
            p = instance.slot  # 16
    return ttft, p, costs


def literal_cheapest(view: ClusterView, r: RequestFeatures, match: PrefixLengths, config: ScheduleConfig):
    """`global_cost`: per instance the cheaper of the two ways, whatever the threshold."""
    never = msgspec.structs.replace(config, balancing_threshold=math.inf)
    always = msgspec.structs.replace(config, balancing_threshold=0.0)
    recomputed, fetched = (literal_algorithm1(view, r, match, c)[2] for c in (never, always))
    costs = {
        slot: fetched[slot] if fetched[slot][0] < recomputed[slot][0] else recomputed[slot]
        for slot in recomputed
    }
    slot = min(costs, key=lambda slot: costs[slot][0], default=None)
    return (math.inf if slot is None else costs[slot][0]), slot, costs


def literal_decode(view: ClusterView, r: RequestFeatures, config: ScheduleConfig):
    loads = {}
    for slot, row in enumerate(view.decode_rows()):
        if not row.alive or r.total_tokens > min(row.max_tokens, row.capacity_tokens):
            continue
        if row.num_requests >= row.num_slots * config.decode_overcommit:
            continue
        if row.committed_tokens + r.total_tokens > row.capacity_tokens * config.decode_overcommit:
            continue
        batch = min(row.num_requests + 1, row.num_slots)
        tbt = config.cost.tbt_seconds(float(batch), float(row.kv_tokens + r.num_tokens))
        tbt *= row.factor
        loads[slot] = (tbt * max(1.0, (row.num_requests + 1) / row.num_slots), tbt)
    return loads


fractions = st.floats(0.0, 1.0, exclude_max=True)
seconds = st.floats(0.0, 5.0)
prefills = st.builds(
    prefill_row,
    alive=st.booleans(),
    queue_seconds=st.one_of(st.just(0.0), st.floats(-5.0, 5.0)),
    max_tokens=st.sampled_from([64, 4096]),
    num_requests=st.integers(0, 8),
    factor=st.sampled_from([0.5, 1.0, 4.0]),
)
decodes = st.builds(
    decode_row,
    alive=st.booleans(),
    num_slots=st.integers(1, 4),
    num_requests=st.integers(0, 9),
    kv_tokens=st.integers(0, 16384),
    committed_tokens=st.integers(0, 32768),
    factor=st.sampled_from([0.5, 1.0, 4.0]),
)
configs = st.builds(
    ScheduleConfig,
    policy=st.sampled_from(["global", "global_cost"]),
    balancing_threshold=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 10.0, math.inf]),
    ttft_slo_seconds=st.sampled_from([0.0, 0.5, 3.0]),
    tbt_slo_seconds=st.sampled_from([0.0, 0.03, 0.1]),
    max_waiting_prompts=st.integers(0, 6),
    decode_overcommit=st.sampled_from([1.0, 2.0]),
    cost=st.builds(
        CostModel,
        prefill_seconds_per_pair=st.sampled_from([0.0, 1e-6]),
        transfer_nbytes_per_second=st.sampled_from([1e3, 1e6, 1e9]),
        tbt_seconds_per_kv_token=st.sampled_from([0.0, 1e-6]),
    ),
)


@st.composite
def problems(draw):
    rows = draw(st.lists(prefills, max_size=8))
    local = draw(st.lists(st.integers(0, 30), min_size=len(rows), max_size=len(rows)))
    best = max([*local, draw(st.integers(0, 30))])
    view = cluster(rows, draw(st.lists(decodes, max_size=8)))
    rates = draw(st.lists(st.sampled_from([1e-9, 1e-5]), min_size=len(rows), max_size=len(rows)))
    link = draw(
        st.sampled_from([None, Link(0.1, 1e-6), Link(0.0, np.array(rates)), Link(np.array(rates), 0.0)])
    )
    return view, PrefixLengths(np.array(local, np.int64), best, "n" if best else "", link)


@settings(max_examples=150, deadline=None)
@given(
    problem=problems(),
    num_tokens=st.integers(1, 500),
    config=configs,
    draws=st.tuples(fractions, fractions),
)
def test_equals_the_literal_algorithm(problem, num_tokens, config, draws):
    view, match = problem
    r = request(num_tokens=num_tokens)
    got = schedule(view, r, match, config, now=NOW, draws=draws)
    literal = literal_algorithm1 if config.policy == "global" else literal_cheapest
    ttft, chosen, costs = literal(view, r, match, config)
    loads = literal_decode(view, r, config)

    if chosen is None or not loads:
        assert got.outcome in {"no_prefill", "no_decode", "too_long", "prefill_full", "decode_full"}
        assert (got.prefill, got.decode) == (-1, -1)
        return
    lowest_load = min(load for load, _ in loads.values())
    best_decodes = {slot: tbt for slot, (load, tbt) in loads.items() if load <= lowest_load * (1 + 1e-9)}
    if not math.isclose(ttft, config.ttft_slo_seconds) and 0 < config.ttft_slo_seconds < ttft:
        assert got.outcome == "ttft_slo"
    elif got.outcome == "tbt_slo":
        assert max(best_decodes.values()) > config.tbt_slo_seconds > 0
    elif got.outcome == "placed":
        total, fetched = costs[got.prefill]
        assert total == pytest.approx(ttft)
        assert got.ttft_seconds == pytest.approx(ttft)
        assert got.fetch_blocks == fetched or config.policy == "global_cost"  # ways of equal cost
        assert got.local_blocks == min(match.local[got.prefill], (num_tokens - 1) // Z)
        assert got.tbt_seconds == pytest.approx(best_decodes[got.decode])
        assert not 0 < config.tbt_slo_seconds < got.tbt_seconds
    else:
        assert got.outcome == "ttft_slo"
        assert math.isclose(ttft, config.ttft_slo_seconds)
    assert (got.outcome == "placed") == (got.retry_after_seconds == 0.0)


# --- the ratio of line 5


@pytest.mark.parametrize(
    ("threshold", "own", "best", "fetched"),
    [
        (2.0, 0, 0, 0),  # 0 / 0: nothing anywhere, nothing to fetch
        (2.0, 0, 1, 1),  # x / 0 is above every finite threshold
        (1e300, 0, 1, 1),
        (math.inf, 0, 10, 0),  # but not above infinity
        (2.0, 5, 10, 0),  # a ratio equal to the threshold recomputes
        (2.0, 4, 10, 10),
        (1.0, 9, 10, 10),
        (1.0, 10, 10, 0),
        (0.0, 10, 10, 0),  # nothing to move although 1 > 0
        (0.0, 9, 10, 10),
        (0.0, 12, 10, 0),  # own blocks still being computed reach beyond the best holder
    ],
)
def test_fetches_by_threshold(threshold, own, best, fetched):
    view = cluster([prefill_row()], [decode_row()])
    got = decide(view, request(), PrefixLengths(np.array([own]), best, "x"), balancing_threshold=threshold)
    assert got.fetch_blocks == fetched
    assert got.local_blocks == own
    reused = max(fetched, own)
    assert got.prefill_seconds == pytest.approx((320 - reused * Z) * 1e-3)
    assert got.transfer_seconds == pytest.approx((best - own) * 1000 / 1e6 if fetched else 0.0)


@pytest.mark.parametrize(("num_tokens", "usable"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_at_least_one_token_is_computed(num_tokens, usable):
    view = cluster([prefill_row(), prefill_row()], [decode_row()])
    got = decide(view, request(num_tokens=num_tokens), lengths(2, 2))
    assert got.local_blocks == usable
    assert got.prefill_seconds == pytest.approx((num_tokens - usable * Z) * 1e-3)


def test_a_long_queue_at_the_holder_sends_the_request_elsewhere_with_the_blocks():
    view = cluster([prefill_row("holder", queue_seconds=1.0), prefill_row("idle")], [decode_row()])
    got = decide(view, request(), lengths(15, 0))
    assert (got.prefill, got.fetch_blocks, got.local_blocks) == (1, 15, 0)
    assert got.transfer_seconds == pytest.approx(15 * 1000 / 1e6)


def test_a_slow_network_keeps_the_request_at_the_holder():
    view = cluster([prefill_row("holder", queue_seconds=0.1), prefill_row("idle")], [decode_row()])
    got = decide(view, request(block_nbytes=100_000), lengths(15, 0))
    assert (got.prefill, got.fetch_blocks) == (0, 0)


def test_blocks_at_a_node_without_an_instance_are_fetched():
    view = cluster([prefill_row()], [decode_row()])
    got = decide(view, request(), lengths(0, best=12))
    assert got.fetch_blocks == 12


# --- ties, draws, purity


def test_ties_are_drawn_evenly_and_only_among_the_lowest():
    view = cluster([prefill_row(queue_seconds=q) for q in (0.0, 1.0, 0.0, -3.0)], [decode_row()] * 3)
    picked = [decide(view, request(), lengths(0, 0, 0, 0), (i / 300, i / 300)) for i in range(300)]
    assert [sum(d.prefill == slot for d in picked) for slot in range(4)] == [100, 0, 100, 100]
    assert [sum(d.decode == slot for d in picked) for slot in range(3)] == [100, 100, 100]


def test_deciding_changes_nothing():
    view = cluster([prefill_row(), prefill_row(queue_seconds=2.0)], [decode_row()])
    match = lengths(3, 5)
    before = view.to_dict(), match.local.copy()
    first = decide(view, request(), match, (0.7, 0.7))
    assert decide(view, request(), match, (0.7, 0.7)) == first
    assert view.to_dict() == before[0]
    assert (match.local == before[1]).all()


# --- nobody there, and limits


def test_nobody_alive():
    dead_p, dead_d = prefill_row(alive=False), decode_row(alive=False)
    assert (
        decide(cluster([], []), request(), PrefixLengths(np.zeros(0, np.int64), 0, "")).outcome
        == "no_prefill"
    )
    assert decide(cluster([dead_p], [decode_row()]), request(), lengths(3)).outcome == "no_prefill"
    assert decide(cluster([prefill_row()], [dead_d]), request(), lengths(3)).outcome == "no_decode"
    assert decide(cluster([prefill_row()], []), request(), lengths(3)).outcome == "no_decode"


def test_too_long_for_everyone_is_told_apart_from_full():
    view = cluster([prefill_row(max_tokens=100)], [decode_row(max_tokens=120)])
    assert decide(view, request(num_tokens=100, max_tokens=20), lengths(0)).outcome == "placed"
    assert decide(view, request(num_tokens=101, max_tokens=1), lengths(0)).outcome == "too_long"
    assert decide(view, request(num_tokens=100, max_tokens=21), lengths(0)).outcome == "too_long"
    small = cluster([prefill_row()], [decode_row(capacity_tokens=100)])
    assert decide(small, request(num_tokens=100, max_tokens=1), lengths(0)).outcome == "too_long"


def test_a_full_prefill_queue_refuses_until_one_of_it_is_done():
    view = cluster([prefill_row(num_requests=6, queue_seconds=12.0)], [decode_row()])
    assert decide(view, request(), lengths(0), max_waiting_prompts=3).outcome == "placed"
    got = decide(view, request(), lengths(0), max_waiting_prompts=2)
    assert got.outcome == "prefill_full"
    assert got.retry_after_seconds == pytest.approx(12.0 / 6)


def test_decode_limits_are_slots_and_capacity():
    slots = cluster([prefill_row()], [decode_row(num_requests=4, committed_tokens=1400, kv_tokens=1000)])
    got = decide(slots, request(), lengths(0), decode_overcommit=1.0)
    assert got.outcome == "decode_full"
    assert got.retry_after_seconds == pytest.approx(2 * 100 / 5 * 0.05)  # 100 tokens left each, 50 ms a token
    assert decide(slots, request(), lengths(0), decode_overcommit=1.25).outcome == "placed"
    capacity = cluster([prefill_row()], [decode_row(committed_tokens=16384 - 351)])
    assert decide(capacity, request(), lengths(0), decode_overcommit=1.0).outcome == "decode_full"
    capacity.put_decode(0, decode_row(committed_tokens=16384 - 352))
    assert decide(capacity, request(), lengths(0), decode_overcommit=1.0).outcome == "placed"


def test_decode_goes_where_a_token_takes_least():
    view = cluster([prefill_row()], [decode_row(num_requests=2), decode_row(num_requests=1)])
    got = decide(view, request(), lengths(0))
    assert (got.decode, got.tbt_seconds) == (1, pytest.approx(0.03))


def test_beyond_the_batch_the_shorter_line_wins():
    view = cluster([prefill_row()], [decode_row(num_requests=6), decode_row(num_requests=4)])
    got = decide(view, request(), lengths(0))
    assert (got.decode, got.tbt_seconds) == (1, pytest.approx(0.05))


def test_avoided_instances_are_taken_only_if_there_are_no_others():
    view = cluster(
        [prefill_row(), prefill_row(queue_seconds=9.0)], [decode_row(), decode_row(num_requests=3)]
    )
    avoiding = request(avoid_prefill=(0,), avoid_decode=(0,))
    got = decide(view, avoiding, lengths(0, 0))
    assert (got.prefill, got.decode) == (1, 1)
    got = decide(view, request(avoid_prefill=(0, 1), avoid_decode=(0, 1)), lengths(0, 0))
    assert (got.prefill, got.decode) == (0, 0)


# --- SLOs


def test_ttft_slo_refuses_until_the_shortest_queue_has_drained():
    dead = prefill_row(queue_seconds=1.5, alive=False)
    view = cluster([prefill_row(queue_seconds=2.0), prefill_row(queue_seconds=3.0), dead], [decode_row()])
    assert decide(view, request(), lengths(0, 0, 0), ttft_slo_seconds=2.33).outcome == "placed"
    got = decide(view, request(), lengths(0, 0, 0), ttft_slo_seconds=1.0)
    assert (got.outcome, got.prefill, got.decode) == ("ttft_slo", -1, -1)
    assert got.ttft_seconds == pytest.approx(2.32)
    assert got.retry_after_seconds == pytest.approx(1.32)


def test_ttft_slo_that_no_wait_can_meet_asks_for_the_longest_wait():
    got = decide(cluster([prefill_row()], [decode_row()]), request(), lengths(0), ttft_slo_seconds=0.3)
    assert (got.outcome, got.retry_after_seconds) == ("ttft_slo", 60.0)


def test_tbt_slo_refuses_until_the_batch_shrinks():
    view = cluster([prefill_row()], [decode_row(num_requests=3, committed_tokens=300)])
    assert decide(view, request(), lengths(0), tbt_slo_seconds=0.0501).outcome == "placed"
    got = decide(view, request(), lengths(0), tbt_slo_seconds=0.045)
    assert got.outcome == "tbt_slo"
    assert got.tbt_seconds == pytest.approx(0.05)
    assert got.retry_after_seconds == pytest.approx(2 * 100 / 4 * 0.04)
    assert decide(view, request(), lengths(0), tbt_slo_seconds=0.015).retry_after_seconds == 60.0


# --- the other policies


def test_policies_of_figure_5():
    rows = [
        prefill_row("holder", queue_seconds=1.0, num_requests=1),
        prefill_row("idle", queue_seconds=0.8, num_requests=2),
        prefill_row("empty", queue_seconds=0.9, num_requests=0),
    ]
    view = cluster(rows, [decode_row()])
    match = lengths(15, 0, 0)
    assert decide(view, request(), match, policy="global").prefill == 1
    assert decide(view, request(), match, policy="global").fetch_blocks == 15
    assert decide(view, request(), match, policy="local").prefill == 0
    assert decide(view, request(), match, policy="load").prefill == 2
    assert decide(view, request(), match, policy="load_seconds").prefill == 1
    drawn = [decide(view, request(), match, (i / 30, 0.0), policy="random").prefill for i in range(30)]
    assert [drawn.count(slot) for slot in range(3)] == [10, 10, 10]
    for policy in ("local", "load", "load_seconds", "random"):
        assert decide(view, request(), match, policy=policy).fetch_blocks == 0


@pytest.mark.parametrize(
    ("own", "nbytes_per_second", "fetches"),
    [
        (9, 1e6, True),  # 6 blocks: 6 ms to fetch, 96 ms to compute
        (9, 62_600.0, True),  # 95.8 ms
        (9, 62_400.0, False),  # 96.2 ms
        (0, 62_400.0, False),  # the ratio is infinite, and still recomputing is faster
        (14, 1e6, True),  # the ratio is below 2, and still fetching is faster
        (15, 1e6, False),
        (17, 1e6, False),
    ],
)
def test_global_cost_fetches_where_that_is_faster(own, nbytes_per_second, fetches):
    view = cluster([prefill_row()], [decode_row()])
    match = PrefixLengths(np.array([own]), 15, "x", Link(0.0, 1 / nbytes_per_second))
    got = decide(view, request(), match, policy="global_cost", balancing_threshold=2.0)
    assert got.fetch_blocks == (15 if fetches else 0)


def test_a_busy_sender_and_a_slow_pair_make_others_better():
    view = cluster([prefill_row(), prefill_row(), prefill_row()], [decode_row()])
    slow_pair = Link(0.0, np.array([1e-3, 1e-6, 1e-3]))
    match = PrefixLengths(np.array([0, 0, 0]), 15, "x", slow_pair)
    assert [decide(view, request(), match, (i / 9, 0.0)).prefill for i in range(9)] == [1] * 9
    busy = match._replace(link=Link(9.0, 1e-6))
    assert decide(view, request(), busy).transfer_seconds == pytest.approx(9.015)
    assert decide(view, request(), busy, policy="global_cost").fetch_blocks == 0


@example(num_prefix=0)
@given(num_prefix=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_reuse_never_costs_more_prefill_than_it_saves(num_prefix):
    cost = CostModel()
    assert (
        0 < cost.prefill_seconds(1000, float(num_prefix + 1)) < cost.prefill_seconds(1000, float(num_prefix))
    )

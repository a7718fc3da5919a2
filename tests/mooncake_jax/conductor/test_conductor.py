"""The Conductor's books: bursts, heartbeats, ends, deaths and replacements, with time as a number."""

from collections import Counter

import pytest

from kvstore.block import BlockFormat
from kvstore.errors import InvalidError, RefusedError, StaleError, UnavailableError
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.estimate import CostModel

LONG = list(range(1600))  # 100 blocks
BLOCK_NBYTES = BlockFormat(2, 1, 4, 16, "float32", 1).nbytes
SLOW_LINKS = CostModel(transfer_nbytes_per_second=1e6)


def distinct(i: int, num_tokens=320) -> list[int]:
    return [10_000 + 1000 * i + j for j in range(num_tokens)]


# --- bursts


def test_different_requests_in_a_burst_spread_evenly(make_cluster):
    cluster = make_cluster(prefill=8, decode=8)
    placements = []
    for i in range(64):
        placements.append(cluster.place(distinct(i)))
        cluster.now += 0.005 / 64
    assert set(Counter(p.prefill.name for p in placements).values()) == {8}
    assert set(Counter(p.decode.name for p in placements).values()) == {8}
    assert cluster.conductor.books["bookings"] == 64


def test_a_burst_with_one_long_prefix_mostly_shares_it(make_cluster):
    cluster = make_cluster(prefill=8, decode=8)
    placements = []
    for i in range(64):
        placements.append(cluster.place(LONG + distinct(i, 40)))
        cluster.now += 0.005 / 64
    assert sum(p.local_blocks >= 100 for p in placements) >= 56
    assert len({p.prefill.name for p in placements}) == 8
    assert all(p.fetch_blocks == 0 for p in placements)  # nobody holds it yet: nothing to fetch


def test_a_burst_on_a_held_prefix_replicates_it(make_cluster):
    cluster = make_cluster(prefill=4, decode=4)
    cluster.hold("p0-home", LONG)
    placements = [cluster.place(LONG + distinct(i, 40)) for i in range(40)]
    counts = Counter(p.prefill.name for p in placements)
    assert max(counts.values()) / 10 < 1.5
    fetched = [p for p in placements if p.fetch_blocks]
    assert fetched
    assert {p.fetch_from for p in fetched} == {"p0-home"}
    assert all(p.fetch_blocks == 100 for p in fetched)
    assert len(fetched) <= 3  # once it is on its way to a node, that node counts as having it


def test_one_at_a_time_uses_everyone(make_cluster):
    cluster = make_cluster(prefill=4, decode=4)
    used = Counter()
    for i in range(80):
        placement = cluster.place(distinct(i))
        used[placement.prefill.name] += 1
        used[placement.decode.name] += 1
        cluster.end(placement.request_id)
        cluster.now += 10.0
        cluster.beat_all()
    assert len(used) == 8
    assert min(used.values()) >= 5


# --- placements


def test_a_placement_says_where_the_prefix_is(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.hold("p0-home", LONG[:320])
    cluster.hold("store-7", LONG)
    placement = cluster.place([*LONG, 7, 8, 9])
    assert placement.keys == cluster.keys(LONG)
    assert (placement.local_blocks, placement.fetch_blocks, placement.fetch_from) == (20, 100, "store-7")
    seconds = 3e-3 + 80 * cluster.conductor.instances.pool.format.nbytes / 1e9
    assert placement.ttft_forecast_seconds == pytest.approx(seconds)
    assert placement.prefill.name == "p0"
    assert placement.decode.name == "d0"


def test_a_whole_prompt_held_leaves_a_block_to_compute(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.hold("p0-home", LONG)
    placement = cluster.place(LONG)
    assert (placement.local_blocks, len(placement.keys)) == (99, 100)


def test_holders_of_equal_length_share_the_fetches(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    for node in ("a", "b", "c"):
        cluster.hold(node, LONG)
    used = Counter()
    for _ in range(60):
        placement = cluster.place(LONG)
        used[placement.fetch_from] += 1
        cluster.end(placement.request_id, ok=False)
    assert set(used) == {"a", "b", "c"}


def test_placing_again_replaces_the_booking(make_cluster):
    cluster = make_cluster()
    first = cluster.place(LONG, request_id="r")
    second = cluster.place(LONG, request_id="r", avoid=[first.prefill.name, first.decode.name])
    assert {first.prefill.name, second.prefill.name} == {"p0", "p1"}
    assert {first.decode.name, second.decode.name} == {"d0", "d1"}
    assert cluster.conductor.books["bookings"] == 1
    assert sum(q > 0 for q in cluster.queue_seconds()) == 1
    assert cluster.conductor.view.decode.num_requests.sum() == 1


def test_no_instance_is_unavailable(make_cluster):
    cluster = make_cluster(prefill=0, decode=0)
    with pytest.raises(UnavailableError, match="no instance has registered"):
        cluster.place(LONG)
    cluster.register("p0")
    with pytest.raises(UnavailableError, match="no decode instance"):
        cluster.place(LONG)
    assert not cluster.conductor.ready
    cluster.register("d0")
    assert cluster.conductor.ready
    cluster.place(LONG)


def test_too_long_names_both_lengths(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    with pytest.raises(InvalidError, match=r"4000 tokens \+ max_tokens 97.*4096"):
        cluster.place(range(4000), max_tokens=97)
    cluster.place(range(4000), max_tokens=96)


def test_refused_tells_when_to_come_back_and_books_nothing(make_cluster):
    schedule = ScheduleConfig(ttft_slo_seconds=2.0, cost=CostModel(prefill_seconds_per_token=1e-3))
    cluster = make_cluster(prefill=1, decode=1, schedule=schedule)
    cluster.place(distinct(0, 1600), request_id="first")
    with pytest.raises(RefusedError, match="TTFT") as refused:
        cluster.place(distinct(2, 1600))
    assert cluster.conductor.books["bookings"] == 1
    cluster.now += refused.value.retry_after_seconds - 0.01
    with pytest.raises(RefusedError):
        cluster.place(distinct(2, 1600))
    cluster.now += 0.02
    cluster.place(distinct(2, 1600))


# --- heartbeats and bookings


def test_a_booking_counts_until_a_heartbeat_lists_it_and_then_the_report_counts(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.place(distinct(0), request_id="a")
    cluster.place(distinct(1), request_id="b")
    assert cluster.queue_seconds() == pytest.approx([0.64])
    cluster.beat("p0", request_ids=["a"], queued_tokens=100, used_slots=1, tokens_per_second=1000.0)
    assert cluster.queue_seconds() == pytest.approx([0.1 + 0.32])
    assert cluster.conductor.view.prefill.num_requests.tolist() == [2]
    cluster.beat("p0", request_ids=["a", "b"], queued_tokens=100, used_slots=1, tokens_per_second=1000.0)
    assert cluster.queue_seconds() == pytest.approx([0.1])
    cluster.beat("d0", request_ids=["a"], used_slots=1, kv_tokens=330)
    row = cluster.conductor.view.decode_rows()[0]
    assert (row.num_requests, row.kv_tokens, row.committed_tokens) == (2, 650, 672)


def test_the_queue_drains_with_time(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.place(distinct(0))
    cluster.now += 0.2
    assert cluster.queue_seconds() == pytest.approx([0.12])
    cluster.now += 5.0
    cluster.place(distinct(1))
    assert cluster.queue_seconds() == pytest.approx([0.32])


def test_a_request_that_a_heartbeat_lists_no_more_is_over_there(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.place(distinct(0), request_id="a")
    cluster.beat("p0", request_ids=["a"])
    cluster.beat("p0", request_ids=[])
    assert cluster.conductor.books["prefill_bookings"] == 0
    assert cluster.conductor.books["decode_bookings"] == 1
    cluster.beat("d0", request_ids=["a"])
    cluster.beat("d0", request_ids=[])
    assert cluster.conductor.books["bookings"] == 0


def test_phases_end_one_by_one(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.place(distinct(0), request_id="a")
    cluster.end("a", "prefill")
    assert cluster.queue_seconds() == [0.0]
    assert cluster.conductor.view.decode.num_requests.tolist() == [1]
    cluster.end("a", "decode")
    cluster.end("a", "decode")
    cluster.end("never heard of")
    assert cluster.conductor.view.decode.num_requests.tolist() == [0]
    assert cluster.conductor.books["bookings"] == 0


def test_expected_blocks_go_with_a_failure_and_settle_after_success(make_cluster):
    cluster = make_cluster(prefill=1, decode=1, expected_block_seconds=3.0)
    cluster.place(LONG, request_id="a")
    cluster.end("a", ok=False)
    assert cluster.open_books == {}
    assert cluster.place(LONG, request_id="b").local_blocks == 0
    cluster.end("b", "prefill", ok=True)
    cluster.now += 2.9
    cluster.beat_all()
    assert cluster.place(LONG, request_id="c").local_blocks == 99  # still on their way to the directory
    cluster.end("b", "decode")
    cluster.end("c", ok=False)
    cluster.now += 0.2
    assert cluster.place(LONG, request_id="d").local_blocks == 0  # the node did not keep them
    cluster.end("d", ok=False)


def test_expectations_lengthen_what_is_held_and_survive_each_other(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.hold("p0-home", LONG[:320])
    cluster.place(LONG[:640], request_id="a")
    cluster.place(LONG[:640], request_id="b")
    cluster.end("a", ok=False)
    assert cluster.place(LONG, request_id="c").local_blocks == 40
    cluster.end("b", ok=False)
    assert cluster.place(LONG[:700], request_id="d").local_blocks == 43  # c expects them too
    cluster.end("c", ok=False)
    cluster.end("d", ok=False)
    assert cluster.place(LONG, request_id="e").local_blocks == 20


def test_silent_bookings_expire_and_mentioned_ones_do_not(make_cluster):
    cluster = make_cluster(prefill=1, decode=1, booking_seconds=10.0)
    cluster.place(distinct(0), request_id="lost")
    cluster.place(distinct(1), request_id="long")
    for _ in range(12):
        cluster.now += 1.0
        cluster.beat("p0")
        cluster.beat("d0", request_ids=["long"])
        cluster.conductor.tick(cluster.now)
    assert cluster.conductor.bookings.get("lost") is None
    assert cluster.conductor.bookings.get("long") is not None


def test_the_factor_follows_measured_prefills_and_stays_bounded(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    for i in range(40):
        cluster.place(distinct(0), request_id=f"r{i}")
        forecast = cluster.conductor.bookings.get(f"r{i}").prefill_seconds
        cluster.end(f"r{i}", "prefill", seconds=0.64)
        cluster.end(f"r{i}", "decode")
        cluster.now += 10.0
        cluster.beat_all()
    assert forecast == pytest.approx(0.64, rel=0.02)
    for i in range(200):
        cluster.place(distinct(0), request_id=f"s{i}")
        cluster.end(f"s{i}", "prefill", seconds=1e6)
        cluster.end(f"s{i}", "decode")
        cluster.now += 10.0
        cluster.beat_all()
    assert cluster.conductor.view.prefill.factor.tolist() == [16.0]


def test_a_group_of_nodes_is_forecast_to_share_the_work(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.register("p1", num_nodes=4)
    assert cluster.place(distinct(0), request_id="a").prefill.name == "p1"
    factors = cluster.conductor.view.prefill.factor.tolist()
    assert factors == [1.0, 0.25]


def test_a_prefill_that_waited_for_a_fetch_teaches_nothing(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.hold("elsewhere", LONG)
    assert cluster.place(LONG, request_id="a").fetch_blocks
    cluster.end("a", "prefill", seconds=100.0)
    cluster.end("a", "decode")
    assert cluster.conductor.view.prefill.factor.tolist() == [1.0]


# --- instances that die, come back, or do not belong


def test_more_reuse_than_forecast_is_not_taken_for_speed(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    for reused, fetched in ((256, 0), (0, 0), (256, 256)):
        placement = cluster.place(range(320))
        assert placement.local_blocks == 0
        seconds = (320 - reused) * 1e-3
        cluster.end(
            placement.request_id, "prefill", True, seconds, cached_tokens=reused, fetched_tokens=fetched
        )
        cluster.end(placement.request_id)
        cluster.now += 10.0
        cluster.beat_all()
    assert cluster.conductor.view.prefill.factor.item(0) == pytest.approx(1.0)
    slow = cluster.place(range(320))
    cluster.end(slow.request_id, "prefill", True, 2 * 64e-3, cached_tokens=256, fetched_tokens=0)
    assert cluster.conductor.view.prefill.factor.item(0) == pytest.approx(2.0**0.1)


def test_own_blocks_on_ssd_take_their_time(make_cluster):
    cluster = make_cluster(prefill=2, decode=1)
    cluster.hold("p0-home", range(320), tier="ssd")
    cluster.hold("p1-home", range(320))
    placement = cluster.place(range(321))
    assert (placement.prefill.name, placement.local_blocks) == ("p1", 20)
    away = cluster.place(range(321), avoid=["p1"])
    assert (away.prefill.name, away.local_blocks) == ("p0", 20)
    seconds = 20 * BLOCK_NBYTES / cluster.config.schedule.cost.ssd_nbytes_per_second
    assert away.ttft_forecast_seconds == pytest.approx(1e-3 + seconds)
    assert cluster.replays(cluster.config.schedule)


def test_an_answer_that_decode_holds_shortens_the_forecast(make_cluster):
    """Prefill continues the prompt's blocks with those of the answer, whose holder has not the first block."""
    cluster = make_cluster(prefill=2, decode=1)
    tokens = list(range(320))
    cluster.hold("p0-home", tokens[:160])
    cluster.index.add("d0-home", cluster.keys(tokens)[10:16])
    placement = cluster.place(tokens)
    assert (placement.prefill.name, placement.local_blocks) == ("p0", 10)
    transfer = 6 * BLOCK_NBYTES / cluster.config.schedule.cost.transfer_nbytes_per_second
    assert placement.ttft_forecast_seconds == pytest.approx(64e-3 + transfer)
    booking = cluster.conductor.bookings.get(placement.request_id)
    assert booking is not None
    assert booking.computed_tokens == 64
    assert cluster.replays(cluster.config.schedule)


def test_missing_heartbeats_drop_an_instance_with_its_bookings(make_cluster):
    cluster = make_cluster(prefill=2, decode=1)
    for i in range(4):
        cluster.place(LONG + distinct(i, 20), request_id=f"r{i}")
    cluster.now += 2.9
    for name in ("p0", "d0"):
        cluster.beat(name)
    cluster.conductor.tick(cluster.now)
    assert cluster.conductor.view.prefill.alive.tolist() == [True, True]
    cluster.now += 0.2
    cluster.conductor.tick(cluster.now)
    assert cluster.conductor.view.prefill.alive.tolist() == [True, False]
    assert cluster.conductor.books["prefill_bookings"] == 2
    assert cluster.conductor.books["decode_bookings"] == 4
    assert {cluster.place(distinct(i)).prefill.name for i in range(9)} == {"p0"}
    assert cluster.beat("p1") is False


def test_a_new_epoch_replaces_the_old_and_the_old_cannot_come_back(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.place(distinct(0), request_id="a")
    assert cluster.beat("p0", epoch=2) is False
    cluster.register("p0", epoch=2)
    assert cluster.queue_seconds() == [0.0]
    assert cluster.conductor.books["prefill_bookings"] == 0
    assert cluster.place(distinct(1)).prefill.epoch == 2
    with pytest.raises(StaleError, match="replaced"):
        cluster.beat("p0", epoch=1)
    with pytest.raises(StaleError, match="replaced"):
        cluster.register("p0", epoch=1)
    assert cluster.beat("p0", epoch=2)
    assert cluster.conductor.view.prefill.alive.tolist() == [True]


def test_registering_twice_keeps_the_bookings(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.place(distinct(0))
    cluster.register("p0")
    assert cluster.queue_seconds() == pytest.approx([0.32])


def test_slots_stay_and_are_used_again(make_cluster):
    cluster = make_cluster(prefill=3, decode=1)
    cluster.now += 4.0
    for name in ("p0", "p2", "d0"):
        cluster.register(name)
    cluster.conductor.tick(cluster.now)
    assert cluster.conductor.view.prefill.names == ["p0", "", "p2"]
    cluster.register("p9")
    assert cluster.conductor.view.prefill.names == ["p0", "p9", "p2"]


def test_another_fingerprint_is_told_both(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    with pytest.raises(InvalidError, match=rf"{b'other'.hex()}.*{b'weights of the test'.hex()}"):
        cluster.register("p1", fingerprint=b"other")
    with pytest.raises(InvalidError, match="fingerprint"):
        cluster.register("p0", epoch=2, fingerprint=b"other")  # d0 still has the old one
    assert cluster.beat("p0")


def test_another_block_format_is_told_both(make_cluster):
    other = BlockFormat(2, 1, 4, 32, "float32", 1)
    with pytest.raises(InvalidError, match=r"block_tokens=32.*block_tokens=16"):
        make_cluster().register("p9", format=other)


def test_a_pool_ends_with_its_last_instance(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    cluster.now += 4.0
    cluster.conductor.tick(cluster.now)
    cluster.register("p0", epoch=2, fingerprint=b"other")
    cluster.register("d0", epoch=2, fingerprint=b"other")
    assert cluster.conductor.ready


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_invalid(make_cluster, rate):
    with pytest.raises(InvalidError, match="tokens_per_second"):
        make_cluster().beat("p0", tokens_per_second=rate)


def test_a_slot_of_no_requests_is_invalid(make_cluster):
    with pytest.raises(InvalidError, match="num_slots 0"):
        make_cluster().register("d9", num_slots=0)


def test_of_equal_holders_the_one_with_the_blocks_in_dram_sends(make_cluster):
    cluster = make_cluster(prefill=1, decode=1)
    for node in ("a", "b"):
        cluster.hold(node, LONG, "ssd" if node == "a" else "dram")
    for _ in range(20):
        placement = cluster.place(LONG)
        assert placement.fetch_from == "b"
        cluster.end(placement.request_id, ok=False)
    cluster.index.forget("b")
    slow = cluster.place(LONG)
    assert slow.fetch_from == "a"
    assert slow.ttft_forecast_seconds > placement.ttft_forecast_seconds


def test_of_equal_holders_the_one_that_sends_least_sends(make_cluster):
    cluster = make_cluster(prefill=2, decode=1, schedule=ScheduleConfig(cost=SLOW_LINKS))
    for node in ("a", "b"):
        cluster.hold(node, LONG)
    used = {cluster.place(LONG, avoid=[avoid]).fetch_from for avoid in ("p0", "p1")}
    assert used == {"a", "b"}

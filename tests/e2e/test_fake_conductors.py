"""Two Conductors over the same instances, which beat to both: a burst is balanced, and one of them may die."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from e2e.cluster import LocalCluster, wait_until
from fakes.engine import FakePrefillEngine

from kvstore.rpc import Empty
from launch.replaying.outcome import Outcome
from launch.replaying.prompts import Line
from launch.replaying.targets import ConductorTarget, replay

NUM_REQUESTS = 64


def lines(first: int, num: int, num_tokens: int = 33) -> list[Line]:
    """Different prompts, all at once."""
    return [
        Line(i, 0.0, [(31 * j + 7 * i) % 200 for j in range(num_tokens)], 3)
        for i in range(first, first + num)
    ]


def send(addresses: list[str], requests: list[Line]) -> list[Outcome]:
    return asyncio.run(replay(ConductorTarget(*addresses), requests, lambda outcome: None))


def slow_engine() -> FakePrefillEngine:
    return FakePrefillEngine(seconds_per_token=0.001)


def test_a_burst_at_both_is_balanced_and_their_books_are_empty_afterwards():
    with (
        LocalCluster(num_prefill=4, num_decode=2, num_conductors=2, prefill_engine=slow_engine) as cluster,
        ThreadPoolExecutor(2) as pool,
    ):
        halves = [lines(0, NUM_REQUESTS // 2), lines(NUM_REQUESTS // 2, NUM_REQUESTS // 2)]
        running = [
            pool.submit(send, [stub.address], half)
            for stub, half in zip(cluster.conductors, halves, strict=True)
        ]
        outcomes = [one for future in running for one in future.result(timeout=120)]
        assert [one.status for one in outcomes] == ["ok"] * NUM_REQUESTS, [one.error for one in outcomes]
        placed = Counter(one.prefill for one in outcomes)
        assert len(placed) == 4
        assert max(placed.values()) / (NUM_REQUESTS / 4) < 1.5
        for stub in cluster.conductors:
            wait_until(
                lambda stub=stub: (
                    stub.cluster(Empty()).num_bookings == 0
                    and not any(load.request_ids for load in stub.cluster(Empty()).loads)
                ),
                "the books are empty",
            )


def test_one_knows_what_the_other_placed():
    held, go_on = threading.Event(), threading.Event()

    def wait(slot: int, start: int, group: int) -> None:
        if not held.is_set():
            held.set()
            assert go_on.wait(60)

    with (
        LocalCluster(
            num_prefill=2,
            num_decode=1,
            num_conductors=2,
            prefill_engine=lambda: FakePrefillEngine(before_group=wait),
        ) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        one, other = cluster.conductors
        running = pool.submit(send, [one.address], lines(0, 1))
        try:
            assert held.wait(60)
            wait_until(
                lambda: any(load.request_ids for load in other.cluster(Empty()).loads),
                "the other heard of it",
            )
            outcomes = [send([other.address], lines(100 + i, 1))[0] for i in range(4)]
        finally:
            go_on.set()
        busy = running.result(timeout=60)[0]
        assert [outcome.status for outcome in (busy, *outcomes)] == ["ok"] * 5
        assert busy.prefill not in {outcome.prefill for outcome in outcomes}


def test_one_that_dies_leaves_nothing_and_the_other_takes_over():
    computing = threading.Event()

    def engine() -> FakePrefillEngine:
        return FakePrefillEngine(
            seconds_per_token=0.002, before_group=lambda slot, start, group: computing.set()
        )

    with (
        LocalCluster(num_prefill=2, num_decode=2, num_conductors=2, prefill_engine=engine) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        both = [stub.address for stub in cluster.conductors]
        in_flight = pool.submit(send, both[::-1], lines(0, 16))
        assert computing.wait(60)
        cluster.stop_conductor(1)
        assert {one.status for one in in_flight.result(timeout=120)} == {"ok"}
        later = send(both[::-1], lines(100, 8))
        assert [one.status for one in later] == ["ok"] * 8, [one.error for one in later]

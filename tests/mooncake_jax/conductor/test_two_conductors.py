"""Two Conductors over the same instances: each books for itself and learns of the other's work by heartbeats."""

from collections import Counter

import pytest

from mooncake_jax.conductor.config import ScheduleConfig

NUM_REQUESTS = 64


def distinct(i: int) -> list[int]:
    return [10_000 + 1000 * i + j for j in range(320)]


@pytest.fixture
def two(make_cluster):
    """Two clusters with the instances of one, each with the books of its own Conductor."""
    return [make_cluster(prefill=8, decode=8, seed=seed) for seed in (1, 2)]


def burst(two, prompt) -> list:
    placements = []
    for i in range(NUM_REQUESTS):
        placements.append(two[i % 2].place(prompt(i), request_id=f"r{i}"))
        for one in two:
            one.now += 0.005 / NUM_REQUESTS
    return placements


def beat(two, placements) -> None:
    """Every instance tells both Conductors all that it has."""
    for name in two[0].names:
        role = "prefill" if name.startswith("p") else "decode"
        here = [p.request_id for p in placements if getattr(p, role).name == name]
        for one in two:
            tokens = 320 * len(here) if role == "prefill" else 0
            assert one.beat(name, request_ids=here, used_slots=len(here), queued_tokens=tokens)


def test_a_burst_over_idle_nodes_is_balanced(two):
    placements = burst(two, distinct)
    for role in ("prefill", "decode"):
        counts = Counter(getattr(placement, role).name for placement in placements)
        assert len(counts) == 8
        assert max(counts.values()) / (NUM_REQUESTS / 8) < 1.5


def test_each_learns_of_the_others_work_and_avoids_it(make_cluster):
    two = [make_cluster(prefill=2, decode=2, seed=seed) for seed in (1, 2)]
    placements = [two[0].place(distinct(i), request_id=f"r{i}") for i in range(5)]
    beat(two, [p for p in placements if p.prefill.name == "p0"])
    other = [two[1].place(distinct(100 + i), request_id=f"s{i}").prefill.name for i in range(2)]
    assert other == ["p1", "p1"]


def test_one_that_dies_leaves_nothing_at_the_other(two):
    placements = burst(two, distinct)
    beat(two, placements)
    survivor = two[1]
    assert survivor.conductor.bookings.books["bookings"] == NUM_REQUESTS / 2
    for placement in placements[1::2]:
        survivor.end(placement.request_id)
    beat(two[1:], [])
    assert survivor.open_books.get("bookings", 0) == 0
    assert max(survivor.queue_seconds()) == 0.0
    assert survivor.conductor.view.decode.num_requests.sum() == 0
    assert survivor.conductor.view.prefill.num_requests.sum() == 0


def test_one_long_prefix_is_shared_without_a_pile_up(make_cluster):
    prefix = list(range(1600))
    two = [make_cluster(prefill=8, decode=8, schedule=ScheduleConfig(), seed=seed) for seed in (1, 2)]
    for one in two:
        one.hold("p0-home", prefix)
    placements = burst(two, lambda i: prefix + distinct(i)[:40])
    counts = Counter(placement.prefill.name for placement in placements)
    assert max(counts.values()) / (NUM_REQUESTS / 8) < 1.5
    reused = sum(max(p.local_blocks, p.fetch_blocks) >= 100 for p in placements)
    assert reused == NUM_REQUESTS

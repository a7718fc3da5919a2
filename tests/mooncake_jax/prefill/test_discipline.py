"""The queue discipline, in virtual time: short requests pass long ones, long ones are not starved, nothing thrashes."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_jax.prefill.discipline import Candidate, choose, next_tile

SPEED = 1000.0
TILE = 500


@dataclass
class Job:
    arrived: float
    tokens: int
    done: int = 0
    began: float | None = None
    ended: float | None = None
    tiles: list[int] = field(default_factory=list)


def simulate(jobs: list[Job], *, aging: float, num_slots: int = 2) -> list[int]:
    """Runs `jobs` to their end at SPEED tokens per second; returns the order of the tiles, by job index."""
    now, order = 0.0, []
    while any(job.ended is None for job in jobs):
        here = [i for i, job in enumerate(jobs) if job.arrived <= now and job.ended is None]
        if not here:
            now = min(job.arrived for job in jobs if job.ended is None)
            continue
        holding = [i for i in here if jobs[i].began is not None]
        assert len(holding) <= num_slots
        candidates = [
            Candidate(
                now - jobs[i].arrived - jobs[i].done / SPEED, jobs[i].tokens - jobs[i].done, i in holding
            )
            for i in here
        ]
        picked = choose(
            candidates,
            tokens_per_second=SPEED,
            free_slots=num_slots - len(holding),
            aging=aging,
        )
        assert picked is not None
        job = jobs[here[picked]]
        job.began = now if job.began is None else job.began
        start, stop = next_tile(job.done, job.tokens, TILE)
        now += (stop - start) / SPEED
        job.done = stop
        order.append(here[picked])
        if job.done == job.tokens:
            job.ended = now
    return order


def long_and_short() -> tuple[Job, list[Job]]:
    return Job(arrived=0.0, tokens=30_000), [Job(arrived=0.1 + i, tokens=200) for i in range(20)]


@pytest.mark.parametrize("aging", [0.0, 0.5, 1.0])
def test_short_requests_pass_a_long_one(aging):
    long, short = long_and_short()
    simulate([long, *short], aging=aging)
    assert (
        max(job.ended - job.arrived for job in short) <= (TILE + 200) / SPEED
    )  # one tile of the long one, then its own
    assert long.ended == pytest.approx(34.0)


def test_with_one_slot_they_must_wait():
    long, short = long_and_short()
    simulate([long, *short], aging=0.5, num_slots=1)
    assert max(job.ended - job.arrived for job in short) > 10


@pytest.mark.parametrize(("aging", "starves"), [(1.0, False), (0.5, False), (0.0, True)])
def test_a_long_one_ends_under_an_endless_load_of_short_ones(aging, starves):
    long = Job(arrived=0.0, tokens=10_000)
    short = [Job(arrived=0.2 * i, tokens=200) for i in range(1000)]  # 100 % load by themselves, for 200 s
    simulate([long, *short], aging=aging)
    work = long.tokens / SPEED
    assert (long.ended > 190) == starves
    assert starves or long.ended <= work / aging + work + 1


def test_equal_requests_run_one_after_the_other():
    order = simulate([Job(arrived=0.01 * i, tokens=2000) for i in range(5)], aging=1.0)
    assert order == sorted(order)


def test_without_a_free_slot_only_begun_requests_are_chosen():
    begun = Candidate(waited_seconds=1.0, remaining_tokens=9000, holds_slot=True)
    short = Candidate(waited_seconds=1.0, remaining_tokens=1, holds_slot=False)
    args = {"tokens_per_second": SPEED, "aging": 1.0}
    assert choose([short, begun], free_slots=0, **args) == 1
    assert choose([short, begun], free_slots=1, **args) == 0
    assert choose([short], free_slots=0, **args) is None
    assert choose([], free_slots=1, **args) is None


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5000)), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 3),
)
@settings(max_examples=50, deadline=None)
def test_every_request_ends_and_the_engine_never_idles(arrivals, aging, num_slots):
    jobs = [Job(arrived, tokens) for arrived, tokens in arrivals]
    simulate(jobs, aging=aging, num_slots=num_slots)
    assert all(job.done == job.tokens for job in jobs)
    last_arrival = max(job.arrived for job in jobs)
    assert max(job.ended for job in jobs) <= last_arrival + sum(job.tokens for job in jobs) / SPEED + 1e-6


def test_tiles_cover_a_prompt_exactly():
    start, seen = 64, []
    while start < 1200:
        tile = next_tile(start, 1200, TILE)
        seen += range(*tile)
        start = tile[1]
    assert seen == list(range(64, 1200))
    with pytest.raises(ValueError, match="no tile"):
        next_tile(1200, 1200, TILE)

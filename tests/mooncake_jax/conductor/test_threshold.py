"""The automatic threshold: it goes where requests would have been served soonest, and not for a trifle."""

import math

import msgspec
import pytest

from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.threshold import CANDIDATES, DEFAULT, AutoThreshold

PREFIX = list(range(1600))


def costs(best: float) -> list[float]:
    return [1.0 if candidate == best else 2.0 for candidate in CANDIDATES]


def test_it_follows_the_cheapest_and_comes_back():
    auto = AutoThreshold()
    assert auto.value == DEFAULT
    auto.learn([1.0] * len(CANDIDATES))
    assert auto.value == DEFAULT
    for _ in range(100):
        auto.learn(costs(math.inf))
    assert auto.value == math.inf
    for _ in range(60):
        auto.learn(costs(1.0))
    assert auto.value == 1.0


def test_a_gain_of_less_than_two_percent_moves_nothing():
    auto = AutoThreshold()
    for _ in range(500):
        auto.learn([0.99 if candidate == 1.0 else 1.0 for candidate in CANDIDATES])
    assert auto.value == DEFAULT
    with pytest.raises(ValueError, match="3 forecasts"):
        auto.learn([1.0] * 3)


def cost(nbytes_per_second: float) -> CostModel:
    return CostModel(
        prefill_base_seconds=0.0,
        prefill_seconds_per_token=1e-3,
        prefill_seconds_per_pair=0.0,
        prefill_seconds_per_prefix_token=0.0,
        transfer_base_seconds=0.0,
        transfer_nbytes_per_second=nbytes_per_second,
    )


@pytest.mark.parametrize(("nbytes_per_second", "expected"), [(1e9, 1.0), (1e3, math.inf)])
def test_a_conductor_learns_what_its_links_are_worth(make_cluster, nbytes_per_second, expected):
    """Two instances that hold 60 of 100 blocks, and a node with all: a ratio of 1.67, below the default."""
    schedule = ScheduleConfig(cost=cost(nbytes_per_second), balancing_threshold=2.0)
    cluster = make_cluster(schedule=schedule, auto_threshold=True)
    cluster.hold("store", PREFIX)
    for node in ("p0-home", "p1-home"):
        cluster.hold(node, PREFIX[: 60 * 16 if expected == 1.0 else 16 * 16])
    for _ in range(400):
        cluster.end(cluster.place([*PREFIX, 1]).request_id, ok=False)
        cluster.now += 10.0
        cluster.beat_all()
    threshold = cluster.conductor.metrics["kvcache_balancing_threshold"]
    assert threshold == 1.0 if expected == 1.0 else threshold > 100 / 16
    placement = cluster.place([*PREFIX, 1])
    assert (placement.fetch_blocks > 0) == (expected == 1.0)
    replayed = msgspec.structs.replace(schedule, balancing_threshold=2.0)
    assert cluster.replays(replayed)


def test_measured_transfers_change_its_mind(make_cluster):
    """The model promises fast links; the heartbeats tell otherwise, and later that they have recovered."""
    cluster = make_cluster(prefill=1, schedule=ScheduleConfig(cost=cost(1e6)), auto_threshold=True)
    cluster.hold("store", PREFIX)
    fetches = []
    for seconds in (5.0, 0.1):  # to fetch: 0.1 s by the model; to compute: 1.6 s
        for _ in range(600):
            placement = cluster.place([*PREFIX, 1])
            if placement.fetch_blocks:
                nbytes = placement.fetch_blocks * cluster.conductor.instances.pool.format.nbytes
                cluster.beat("p0", fetches=[("store", nbytes, seconds)])
            fetches.append(placement.fetch_blocks > 0)
            cluster.end(placement.request_id, ok=False)
            cluster.now += 1.0
            cluster.beat_all()
    assert fetches[0]
    assert sum(fetches[400:600]) < 20
    assert sum(fetches[1000:1200]) > 180

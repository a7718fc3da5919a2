"""Hot prefixes, overload and long prompts, with queues that take the modelled time (public cases 51 and 54).

Reported as ai-dynamo/dynamo#737, llm-d/llm-d-router#669, AMD-AGI/Infera#103 (a hot prefix sends all to one);
vllm-project/vllm#18826 and #13395, sgl-project/sglang#32549, ROCm/ATOM#1835, ai-dynamo/dynamo#9688 (queues without
limit, short prompts behind a long one, no early rejection).
"""

import random
import statistics

import numpy as np
import pytest
from fakes.prefill_queues import Load

from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.estimate import CostModel

COST = CostModel(
    prefill_base_seconds=0.0,
    prefill_seconds_per_token=1e-3,
    prefill_seconds_per_pair=0.0,
    prefill_seconds_per_prefix_token=0.0,
    transfer_base_seconds=0.0,
    transfer_nbytes_per_second=1e9,
)
PREFIX = list(range(2048))


def tail(i: int, num_tokens: int) -> list[int]:
    return [100_000 + 1000 * i + j for j in range(num_tokens)]


def hot_prefix(make_cluster, policy: str) -> Load:
    """200 requests of one 2k-token prefix and 200 tokens of their own, at twice what one node computes."""
    load = Load(make_cluster(prefill=4, schedule=ScheduleConfig(policy=policy, cost=COST)))
    start, chance = load.cluster.now, random.Random(7)
    at = 0.0
    for i in range(200):
        at += chance.expovariate(2 / 0.2)
        load.send(start + at, PREFIX + tail(i, 200))
    load.run()
    return load


def test_a_hot_prefix_is_spread(make_cluster):
    ours, randomly = hot_prefix(make_cluster, "global"), hot_prefix(make_cluster, "random")
    counts = ours.counts()
    assert sum(counts) == 200
    assert max(counts) / statistics.mean(counts) < 1.5
    keys = ours.cluster.keys(PREFIX)
    assert sum(length == len(keys) for length in ours.cluster.index.lengths(keys).values()) >= 3
    p99 = [np.quantile([one.ttft_seconds for one in load.served], 0.99) for load in (ours, randomly)]
    assert p99[0] < 2 * p99[1]
    hits = [sum(one.reused_blocks for one in load.served) for load in (ours, randomly)]
    assert hits[0] >= hits[1]
    assert hits[0] > 0.9 * sum(one.num_blocks for one in ours.served) * 2048 / 2248


def test_one_request_at_a_time_does_not_always_go_to_the_same(make_cluster):
    load = Load(make_cluster(prefill=4, schedule=ScheduleConfig(cost=COST)))
    start = load.cluster.now
    for i in range(80):
        load.send(start + 10.0 * i, tail(i, 100))
    load.run()
    assert min(load.counts()) >= 5


def overload(make_cluster, times: float, seconds: float = 20.0) -> Load:
    """Prompts of 200 tokens, `times` what two nodes compute, with a TTFT SLO of 1 s; then 20 s at half of that."""
    schedule = ScheduleConfig(cost=COST, ttft_slo_seconds=1.0)
    load = Load(make_cluster(prefill=2, schedule=schedule))
    start, chance, at, i = load.cluster.now, random.Random(3), 0.0, 0
    for until, rate in ((seconds, times * 2 / 0.2), (seconds + 20.0, 0.5 * 2 / 0.2)):
        while at < until:
            at += chance.expovariate(rate)
            i += 1
            load.send(start + at, tail(i, 200))
    load.run()
    return load


@pytest.mark.parametrize("times", [5.0, 10.0])
def test_overload_is_refused_at_once_and_what_is_accepted_meets_its_slo(make_cluster, times):
    load = overload(make_cluster, times)
    start = min(one.arrived_at for one in load.served)
    assert all(0.0 < retry <= 60.0 for _, retry in load.refused)
    accepted = [one for one in load.served if one.arrived_at < start + 20.0]
    met = sum(one.ttft_seconds <= 1.0 for one in accepted)
    assert met / len(accepted) >= 0.95
    assert met >= 0.9 * 20.0 * 2 / 0.2  # nearly all that the nodes can compute
    assert len(load.refused) > (times - 1.5) * 20.0 * 2 / 0.2
    assert not [at for at, _ in load.refused if at > start + 25.0]  # recovered


def test_nothing_is_refused_while_the_slo_can_be_met(make_cluster):
    load = overload(make_cluster, 0.5)
    assert load.refused == []
    assert max(one.ttft_seconds for one in load.served) <= 1.0


def test_a_long_prompt_does_not_stand_before_short_ones(make_cluster):
    """One of 30,000 tokens and fifty of 100: they go to the other node."""
    roomy = {"max_tokens": 40_000, "kv_capacity_tokens": 400_000}
    cluster = make_cluster(prefill=2, schedule=ScheduleConfig(cost=COST), instances=roomy)
    load = Load(cluster)
    load.send(cluster.now, tail(0, 30_000))
    for i in range(1, 51):
        load.send(cluster.now + 0.11 * i, tail(1000 + i, 100))
    load.run()
    long, *short = load.served
    assert {one.node for one in short} == {"p0", "p1"} - {long.node}
    assert max(one.ttft_seconds for one in short) < 0.3

"""A constant changed on purpose moves the figures the way theory says: on the figures' own clusters and traces."""

import os
from pathlib import Path

import numpy as np
import pytest

from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from mooncake_jax.cost_model import CostModelFile

PUBLIC = Path(os.environ.get("MOONCAKE_TRACES", Path(__file__).parents[4] / "shared" / "traces"))
NUM_REQUESTS = 1200
GBPS = 1e9 / 8

pytestmark = pytest.mark.skipif(
    not PUBLIC.is_dir(), reason="the public traces are not here (MOONCAKE_TRACES)"
)


@pytest.fixture(scope="module")
def lab():
    return Lab(PUBLIC, CostModelFile.load("a800_llama3_70b"), NUM_REQUESTS)


@pytest.fixture(scope="module")
def chosen():
    return Assumptions.load().chosen


@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_a_threshold_out_of_reach_turns_the_global_cache_into_local_ones(lab, chosen, trace):
    """Figure 10: nobody fetches, so hits fall and GPU time rises to what the policy `local` has, request by request."""
    ten = {"num_prefill": 10, "num_decode": 1, "one_output": True}
    shared = lab.cluster(trace, chosen, balancing_threshold=1.0, **ten)
    never = lab.cluster(trace, chosen, balancing_threshold=float("inf"), **ten)
    local = lab.cluster(trace, chosen, policy="local", **ten)
    np.testing.assert_array_equal(never.outcomes.ttft_seconds, local.outcomes.ttft_seconds)
    assert shared.outcomes.fetched_tokens.any()
    assert not never.outcomes.fetched_tokens.any()
    assert never.outcomes.hit_rate < shared.outcomes.hit_rate
    assert never.gpu_seconds > shared.gpu_seconds


@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_transfers_that_cost_nothing_take_ttft_down_to_what_computing_takes(lab, chosen, trace):
    """Figure 13: every doubling of bandwidth helps less; without any limit only set-up times are left of transfers."""
    rates = (24.0, 40.0, 100.0, 400.0, 1e9)
    runs = [
        lab.cluster(trace, chosen, nic_nbytes_per_second=rate * GBPS, balancing_threshold=1.0)
        for rate in rates
    ]
    ttft = [run.outcomes.mean_ttft_seconds for run in runs]
    transfer = [float(run.outcomes.transfer_seconds.mean()) for run in runs]
    assert ttft[0] > ttft[1] > ttft[2] > ttft[-1]
    assert transfer == sorted(transfer, reverse=True)
    assert transfer[-1] == pytest.approx(lab.costs.transfer_base_seconds, abs=1e-3)
    computed = lab.costs.prefill_seconds(
        runs[-1].outcomes.num_tokens.astype(float), runs[-1].outcomes.prefix_tokens.astype(float)
    )
    loaded = lab.costs.load_seconds(runs[-1].outcomes.num_tokens.astype(float))
    least = computed + loaded + lab.costs.scheduling_seconds
    assert (runs[-1].outcomes.ttft_seconds > least - lab.costs.prefill_base_seconds - 1e-9).all()


@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
@pytest.mark.parametrize("policy", ["global", "local"])
def test_giving_up_any_block_in_place_of_the_oldest_costs_hits_and_time(lab, chosen, trace, policy):
    """Figures 8 and 9: blocks of one chain are worth something together, and the recent ones are used again."""
    scarce = {"policy": policy, "dram_tokens": 400_000}
    lru = lab.cluster(trace, chosen, eviction="lru", **scarce)
    chance = lab.cluster(trace, chosen, eviction="random", **scarce)
    ample = lab.cluster(trace, chosen, policy=policy)
    assert chance.outcomes.hit_rate < 0.95 * lru.outcomes.hit_rate
    assert lru.outcomes.hit_rate < ample.outcomes.hit_rate
    assert chance.gpu_seconds > lru.gpu_seconds > ample.gpu_seconds

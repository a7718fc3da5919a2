"""A simulated cluster: every request is accounted for, and its parts add up to what a person computes."""

import dataclasses

import msgspec
import numpy as np
import pytest

from mooncake_jax.simulation import (
    Cluster,
    ClusterConfig,
    CoupledCluster,
    CoupledConfig,
    Failure,
    State,
    UnaccountedError,
    Workload,
    simulate,
)
from mooncake_jax.simulation.ledger import Ledger


def config(costs, **changes):
    return ClusterConfig(**{"num_prefill": 3, "num_decode": 2, "costs": costs, **changes})


def alone(num_tokens, num_outputs, chain=()):
    return Workload("alone", [1.0], [num_tokens], [num_outputs], [list(chain)])


def test_one_request_takes_the_sum_of_its_parts(make_costs):
    costs = make_costs(scheduling_seconds=0.5)
    outcomes = simulate(config(costs), alone(10_000, 5))
    prefill = 0.1 + 1e-4 * 10_000 + 1e-9 * 0.5 * 10_000**2
    transfer, load = 10_000 * 1000 / 1e8, 10_000 * 1000 / 1e9  # the transfer hides behind the computation
    assert transfer < prefill
    assert outcomes.ttft_seconds[0] == pytest.approx(0.5 + prefill + load)
    assert outcomes.transfer_seconds[0] == pytest.approx(transfer)
    steps = [0.02 + 1e-7 * (10_000 + step) for step in range(4)]
    assert outcomes.mean_tbt_seconds[0] == pytest.approx(sum(steps) / 4)
    assert outcomes.tbt_seconds[0] == pytest.approx(steps[-1])


def test_a_slow_nic_is_waited_for(make_costs):
    outcomes = simulate(config(make_costs(nic_nbytes_per_second=1e6)), alone(10_000, 1))
    assert outcomes.ttft_seconds[0] == pytest.approx(10.0 + 0.01)


@pytest.mark.parametrize("policy", ["global", "local", "load", "random"])
@pytest.mark.parametrize("discipline", ["fifo", "batch", "tiles"])
def test_every_request_finishes_and_nothing_stays_booked(costs, make_workload, policy, discipline):
    workload = make_workload(120, 1)
    cluster = Cluster(config(costs, policy=policy, discipline=discipline, dram_tokens=60_000), workload)
    outcomes = cluster.run()
    assert outcomes.finished.all()
    view = cluster.books.view()
    for column in (view.prefill.num_requests, view.decode.num_requests, view.decode.kv_tokens):
        assert not column.any()
    assert not view.decode.committed_tokens.any()
    np.testing.assert_allclose(
        view.prefill.busy_until, [prefill.free_at for prefill in cluster.prefills], atol=1e-6
    )
    assert np.isfinite(outcomes.tbt_seconds).all()
    assert (outcomes.prefix_tokens < outcomes.num_tokens).all()


def test_equal_seeds_are_equal_runs(costs, make_workload):
    workload = make_workload(80, 2)
    first, again, other = (
        simulate(config(costs, policy="random", seed=seed), workload) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.ttft_seconds, again.ttft_seconds)
    assert (first.ttft_seconds != other.ttft_seconds).any()


def test_an_slo_out_of_reach_rejects_and_a_rejected_request_is_not_effective(costs, make_workload):
    workload = make_workload(100, 3, seconds=2.0)
    outcomes = simulate(config(costs, ttft_slo_seconds=2.0), workload)
    assert 0 < outcomes.count(State.REJECTED) < 100
    assert outcomes.count(State.REJECTED) + outcomes.count(State.FINISHED) == 100
    assert outcomes.effective(1e9, 1e9) == pytest.approx(outcomes.count(State.FINISHED) / 100)
    late = simulate(config(costs), workload).ttft_seconds.mean()
    assert outcomes.mean_ttft_seconds < late


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_dies_takes_only_its_own_with_it(costs, make_workload, role):
    workload = make_workload(150, 4)
    whole = config(costs, num_prefill=6)
    broken = dataclasses.replace(whole, failures=(Failure(20.3, role, 0), Failure(21.0, role, 0)))
    cluster = Cluster(broken, workload)
    outcomes = cluster.run()
    lost = outcomes.count(State.FAILED)
    assert outcomes.count(State.FINISHED) + lost == 150
    assert not cluster.books.view().decode.num_requests.any()
    if role == "prefill":  # before a first token a request is tried elsewhere
        assert lost == 0
        assert not cluster.caches.index.num_keys("p0")
        assert outcomes.mean_ttft_seconds > simulate(whole, workload).mean_ttft_seconds
    else:
        assert 0 < lost < 75


def test_when_all_have_died_the_rest_fails(costs, make_workload):
    workload = make_workload(60, 5)
    failures = tuple(Failure(8.0, "decode", number) for number in range(2))
    outcomes = simulate(config(costs, failures=failures), workload)
    late = np.array(workload.arrivals) > 8.0
    assert (outcomes.state[late] == State.FAILED).all()
    assert outcomes.count(State.FINISHED) > 0


def test_an_open_request_and_one_that_ends_twice_are_errors(make_workload):
    ledger = Ledger(make_workload(3, 0))
    ledger.end(0, State.FINISHED)
    with pytest.raises(UnaccountedError, match="ended twice"):
        ledger.end(0, State.REJECTED)
    with pytest.raises(UnaccountedError, match="2 of 3"):
        ledger.close([])


def test_a_pipeline_of_nodes_is_faster_for_a_long_prompt(costs):
    single = simulate(config(costs), alone(100_000, 1)).ttft_seconds[0]
    grouped = simulate(config(costs, nodes_per_group=4, chunk_tokens=5_000), alone(100_000, 1)).ttft_seconds[
        0
    ]
    prefill = 0.1 + 10.0 + 5.0
    assert single == pytest.approx(prefill + 0.1)
    assert grouped == pytest.approx(prefill / 20 / 4 * (20 + 3) + 0.1)  # chunks and stages less one


def test_blocks_come_back_from_ssd_slower_than_from_dram(costs):
    chain, other = list(range(20)), list(range(100, 120))
    num = 20 * 512
    workload = Workload("ssd", [0.0, 10.0, 20.0], [num + 1] * 3, [1] * 3, [chain, other, chain])
    one = config(costs, num_prefill=1, dram_tokens=20 * 512)
    without = simulate(one, workload)
    tiered = simulate(dataclasses.replace(one, ssd_tokens=20 * 512), workload)
    ample = simulate(dataclasses.replace(one, dram_tokens=40 * 512), workload)
    assert [run.prefix_tokens[2] for run in (without, tiered, ample)] == [0, num, num]
    read = 20 * 512 * 1000 / costs.ssd_nbytes_per_second
    assert tiered.ttft_seconds[2] == pytest.approx(ample.ttft_seconds[2] + read)


def test_without_reuse_nothing_hits(costs, make_workload):
    assert simulate(config(costs, reuse=False), make_workload(40, 6)).hit_rate == 0.0


@pytest.mark.parametrize("mode", ["plain", "prefix_caching", "chunked_prefill"])
def test_the_baseline_finishes_all_and_only_caching_reuses(costs, make_workload, mode):
    cluster = CoupledCluster(CoupledConfig(num_nodes=2, costs=costs, mode=mode), make_workload(80, 7))
    outcomes = cluster.run()
    assert outcomes.finished.all()
    assert (outcomes.hit_rate > 0.0) == (mode == "prefix_caching")
    assert cluster.gpu_seconds > 0.0


def test_a_prompt_beyond_every_budget_is_still_served(costs):
    outcomes = CoupledCluster(
        CoupledConfig(num_nodes=1, costs=costs, batched_tokens=100), alone(200_000, 2)
    ).run()
    assert outcomes.finished.all()


@pytest.mark.parametrize(
    "changes",
    [{"num_prefill": 0}, {"policy": "best"}, {"failures": (Failure(0.0, "decode", 2),)}, {"chunk_tokens": 0}],
)
def test_a_config_that_cannot_be_is_refused(costs, changes):
    with pytest.raises(ValueError, match=r"must be|expected|there are"):
        config(costs, **changes)


def test_theory_an_infinite_threshold_is_the_local_policy(costs, make_workload):
    workload = make_workload(150, 8, seconds=60.0)
    local = simulate(config(costs, policy="local"), workload)
    never = simulate(config(costs, balancing_threshold=float("inf")), workload)
    always = simulate(config(costs, balancing_threshold=1.0), workload)
    np.testing.assert_array_equal(never.ttft_seconds, local.ttft_seconds)
    assert not never.fetched_tokens.any()
    assert always.fetched_tokens.any()
    assert always.hit_rate > never.hit_rate


def test_theory_free_transfers_let_everybody_share(costs, make_workload):
    workload = make_workload(150, 9, seconds=60.0)
    free = msgspec.structs.replace(costs, nic_nbytes_per_second=1e15)
    dear = msgspec.structs.replace(costs, nic_nbytes_per_second=1e7)
    cheap, costly = (simulate(config(some, balancing_threshold=1.0), workload) for some in (free, dear))
    assert cheap.mean_ttft_seconds < 0.7 * costly.mean_ttft_seconds


def test_theory_lru_beats_chance(a800, make_workload):
    workload = make_workload(600, 10, seconds=600.0)
    lru, chance = (
        simulate(config(a800, dram_tokens=30_000, eviction=eviction, policy="local"), workload)
        for eviction in ("lru", "random")
    )
    assert lru.hit_rate > 1.05 * chance.hit_rate
    assert lru.mean_ttft_seconds < chance.mean_ttft_seconds

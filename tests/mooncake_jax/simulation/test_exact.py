"""Batches that are counted many steps at a time, against loops that take one step after the other."""

import math

import numpy as np
import pytest

from mooncake_jax.simulation import CoupledCluster, CoupledConfig, Workload
from mooncake_jax.simulation.batch import Batch
from mooncake_jax.simulation.decode import DecodeNode
from mooncake_jax.simulation.events import EventLoop
from mooncake_jax.simulation.ledger import Ledger, State


def longest_tenth(intervals):
    if not intervals:
        return 0.0
    kept = sorted(intervals)[-math.ceil(len(intervals) / 10) :]
    return sum(kept) / len(kept)


class Stepwise:
    """A batch that takes one step at a time; `tokens[request]` are the times of its tokens."""

    def __init__(self, costs):
        self.costs = costs
        self.now = 0.0
        self.left, self.kv, self.tokens = {}, {}, {}

    def join(self, request, kv_tokens, num_outputs, first_token_at=None):
        self.tokens[request] = [self.now if first_token_at is None else first_token_at]
        if num_outputs > 1:
            self.left[request], self.kv[request] = num_outputs - 1, kv_tokens

    def step(self, seconds=None):
        alone = self.costs.step_seconds(len(self.left), sum(self.kv.values()))
        self.now += alone if seconds is None else seconds
        for request in list(self.left):
            self.tokens[request].append(self.now)
            self.kv[request] += 1
            self.left[request] -= 1
            if not self.left[request]:
                del self.left[request], self.kv[request]

    def compare(self, workload, outcomes):
        for request, times in self.tokens.items():
            intervals = list(np.diff(times))
            ttft = times[0] - workload.arrivals[request]
            assert outcomes.ttft_seconds[request] == pytest.approx(ttft, rel=1e-9, abs=1e-9)
            assert outcomes.tbt_seconds[request] == pytest.approx(longest_tenth(intervals), rel=1e-9)
            mean = sum(intervals) / max(len(intervals), 1)
            assert outcomes.mean_tbt_seconds[request] == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("num_slots", [3, 64])
@pytest.mark.parametrize("seed", range(4))
def test_a_decode_node(costs, make_workload, num_slots, seed):
    workload = make_workload(60, seed, seconds=25.0)
    workload = Workload(
        "decode",
        workload.arrivals,
        workload.num_tokens,
        [n + 1 for n in workload.num_outputs],
        workload.chains,
    )
    loop, ledger = EventLoop(), Ledger(workload)

    def joined(request, step):
        ledger.node[request], ledger.first_step[request] = 0, step
        ledger.first_token_at[request] = workload.arrivals[request]
        ledger.first_wait[request] = loop.now - workload.arrivals[request]

    def left(requests):
        for request in requests:
            ledger.end(request, State.FINISHED)

    node = DecodeNode(loop, costs, num_slots=num_slots, capacity_tokens=10**9, joined=joined, left=left)
    loop.run(
        workload.arrivals,
        lambda request: node.add(request, workload.num_tokens[request], workload.num_outputs[request] - 1),
    )
    outcomes = ledger.close([node.batch.log])

    slow = Stepwise(costs)
    coming = list(range(len(workload)))
    while coming or slow.left:
        if not slow.left:
            slow.now = max(slow.now, workload.arrivals[coming[0]])
        while coming and workload.arrivals[coming[0]] <= slow.now and len(slow.left) < num_slots:
            request = coming.pop(0)
            slow.join(
                request,
                workload.num_tokens[request],
                workload.num_outputs[request],
                workload.arrivals[request],
            )
        slow.step()
    slow.compare(workload, outcomes)
    assert len(slow.tokens) == len(workload)
    assert node.busy_seconds == pytest.approx(node.batch.log.durations().sum())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["plain", "chunked_prefill"])
def test_a_coupled_node(make_costs, make_workload, mode, seed):
    costs = make_costs(hbm_kv_nbytes=1e8)  # so that prompts wait for room, too
    workload = make_workload(50, seed, seconds=40.0)
    config = CoupledConfig(num_nodes=1, costs=costs, mode=mode, batched_tokens=30_000, chunk_tokens=700)
    outcomes = CoupledCluster(config, workload).run()

    slow = Stepwise(costs)
    coming, started = list(range(len(workload))), []
    num_tokens = workload.num_tokens

    def room(request):
        return sum(
            num_tokens[other] + workload.num_outputs[other]
            for other in [*slow.left, *(one for one, _ in started), request]
        ) <= costs.hbm_kv_tokens or not (slow.left or started)

    def arrived():
        return bool(coming) and workload.arrivals[coming[0]] <= slow.now

    while coming or slow.left or started:
        if not slow.left and not started and not arrived():
            slow.now = workload.arrivals[coming[0]]
        if mode == "plain":
            passed = []
            while arrived() and room(coming[0]):
                if passed and sum(num_tokens[one] for one, _ in started) + num_tokens[coming[0]] > 30_000:
                    break
                passed.append(coming.pop(0))
                started.append((passed[-1], 0))
            if passed:
                slow.now += costs.prefill_base_seconds + sum(
                    costs.prefill_seconds(num_tokens[one], 0) - costs.prefill_base_seconds for one in passed
                )
                started.clear()
                for one in passed:
                    slow.join(one, num_tokens[one], workload.num_outputs[one])
            else:
                slow.step()
            continue
        budget, seconds, ended, position = 700 - len(slow.left), 0.0, [], 0
        while budget:
            if position == len(started):
                if not (arrived() and room(coming[0])):
                    break
                started.append((coming.pop(0), 0))
            one, start = started[position]
            stop = min(num_tokens[one], start + budget)
            seconds += costs.prefill_seconds(stop, start) - costs.prefill_base_seconds
            budget -= stop - start
            started[position] = (one, stop)
            if stop == num_tokens[one]:
                ended.append(one)
            position += 1
        if not position:
            slow.step()
            continue
        decode = 0.0
        if slow.left:
            decode = costs.step_seconds(len(slow.left), sum(slow.kv.values())) - costs.decode_base_seconds
        seconds += costs.prefill_base_seconds + decode
        if slow.left:
            slow.step(seconds)
        else:
            slow.now += seconds
        started = [(one, stop) for one, stop in started if one not in ended]
        for one in ended:
            slow.join(one, num_tokens[one], workload.num_outputs[one])
    assert len(slow.tokens) == len(workload)
    slow.compare(workload, outcomes)


def test_steps_until_is_the_fewest(costs):
    batch = Batch(costs)
    batch.join(0, 5_000, 1_000)
    batch.join(1, 70_000, 1_000)
    for seconds in (1e-9, 0.02, batch.seconds(1), batch.seconds(7), 0.5, 3.0):
        count = batch.steps_until(seconds)
        assert batch.seconds(count) >= seconds > batch.seconds(count - 1)
    assert batch.steps_until(0.0) == 0

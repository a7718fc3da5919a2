"""The baseline: nodes that prefill and decode both, in three modes, after vLLM 0.5.

- `plain`: prompts that wait are computed at once, in a pass of their own, while the batch stands still;
- `prefix_caching`: the same, and blocks of earlier prompts are reused while they fit into the device's memory;
- `chunked_prefill`: prompts are computed piecewise, a piece in every decode step, first come first served.

A prompt is let in when the KV of prompt and answer fits, so nothing is ever preempted.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.node.eviction import LeastRecent
from mooncake_jax.simulation.batch import Batch
from mooncake_jax.simulation.config import CoupledConfig
from mooncake_jax.simulation.events import EventLoop
from mooncake_jax.simulation.ledger import Ledger, Outcomes, State
from mooncake_jax.simulation.workload import Workload
from mooncake_jax.trace import BLOCK_TOKENS, leading


class DeviceCache:
    """Blocks of earlier prompts in a node's device memory."""

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        self._order: LeastRecent[int] = LeastRecent()
        self._held: set[int] = set()
        self._uses = 0

    def use(self, keys: Sequence[int]) -> int:
        """How many leading `keys` are here; all of them are from now on."""
        self._uses += 1
        num_held = leading(keys, self._held)
        self._order.put_chain(keys, self._uses)
        self._held.update(keys)
        if len(self._order) > self._num_blocks:
            self._held.difference_update(self._order.pop_oldest(len(self._order) - self._num_blocks))
        return num_held


class CoupledNode:
    """One node; an event per pass and per change of the batch."""

    def __init__(
        self,
        loop: EventLoop,
        config: CoupledConfig,
        workload: Workload,
        *,
        joined: Callable[[int, int], None],
        left: Callable[[list[int]], None],
        reused: Callable[[int, int], None],
    ):
        costs = config.costs
        self.batch = Batch(costs)
        self.prefill_seconds = 0.0  # of its time that prompts took
        self._loop, self._config, self._costs, self._workload = loop, config, costs, workload
        self._joined, self._left, self._reused = joined, left, reused
        self._waiting: deque[int] = deque()
        self._started: deque[list[int]] = deque()  # [request, tokens done] with `chunked_prefill`
        self._cache = (
            DeviceCache(costs.hbm_kv_tokens // BLOCK_TOKENS) if config.mode == "prefix_caching" else None
        )
        self._reserved_tokens = 0
        self._edge = 0.0  # when the steps done were done
        self._planned = 0  # decode steps to the next change
        self._plan = 0
        self._busy = False

    def add(self, request: int) -> None:
        """`request` arrives."""
        self._waiting.append(request)
        if not self._busy:
            self._edge = self._loop.now
            self._next()
        elif self._planned and self._fits(self._waiting[0]):
            steps = self.batch.steps_until(self._loop.now - self._edge)
            if steps < self._planned:
                self._schedule(steps)

    def _total(self, request: int) -> int:
        return self._workload.num_tokens[request] + self._workload.num_outputs[request]

    def _fits(self, request: int) -> bool:
        free_slots = self._config.num_slots - len(self.batch) - len(self._started)
        room = self._costs.hbm_kv_tokens - self._reserved_tokens
        return free_slots > 0 and (self._total(request) <= room or not self._reserved_tokens)

    def _next(self) -> None:
        # at an edge: what to do now
        self._busy = True
        if self._config.mode == "chunked_prefill":
            if (self._waiting or self._started) and self._mixed_step():
                return
        elif self._waiting and self._fits(self._waiting[0]):
            self._prefill_pass()
            return
        if len(self.batch):
            self._schedule(self.batch.steps_to_end())
        else:
            self._busy = False
            self._planned = 0

    def _schedule(self, steps: int) -> None:
        self._plan += 1
        self._planned = steps
        self._loop.at(self._edge + self.batch.seconds(steps), self._reach, self._plan)

    def _reach(self, plan: int) -> None:
        if plan != self._plan:
            return
        steps, self._planned = self._planned, 0
        self._edge = self._loop.now
        self._finish(self.batch.advance(steps))
        self._next()

    def _prefill_pass(self) -> None:
        costs, tokens, requests = self._costs, self._workload.num_tokens, []
        seconds, num_batched = costs.prefill_base_seconds, 0
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting[0]
            if requests and num_batched + tokens[request] > self._config.batched_tokens:
                break
            self._waiting.popleft()
            self._reserved_tokens += self._total(request)
            prefix = self._prefix(request)
            num_batched += tokens[request] - prefix
            seconds += costs.prefill_seconds(tokens[request], prefix) - costs.prefill_base_seconds
            requests.append(request)
            if len(requests) + len(self.batch) == self._config.num_slots:
                break
        self.prefill_seconds += seconds
        self.batch.log.stall(self.batch.step, seconds)
        self._planned = 0
        self._loop.at(self._loop.now + seconds, self._prefilled, requests)

    def _prefix(self, request: int) -> int:
        if self._cache is None:
            return 0
        keys, tokens = self._workload.chains[request], self._workload.num_tokens[request]
        prefix = min(self._cache.use(keys), (tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        self._reused(request, prefix)
        return prefix

    def _prefilled(self, requests: list[int]) -> None:
        self._edge = self._loop.now
        for request in requests:
            self._join(request)
        self._next()

    def _join(self, request: int) -> None:
        num_steps = self._workload.num_outputs[request] - 1
        self._joined(request, self.batch.step)
        if num_steps:
            self.batch.join(request, self._workload.num_tokens[request], num_steps)
        else:
            self._finish([request])

    def _finish(self, requests: list[int]) -> None:
        for request in requests:
            self._reserved_tokens -= self._total(request)
        if requests:
            self._left(requests)

    def _mixed_step(self) -> bool:
        # one step of the batch with as many tokens of prompts as the chunk has room for; False: no prompt fits
        costs, batch, tokens = self._costs, self.batch, self._workload.num_tokens
        room = self._config.chunk_tokens - len(batch)
        seconds, whole = 0.0, []
        position = 0
        while room > 0:
            if position == len(self._started):
                if not (self._waiting and self._fits(self._waiting[0])):
                    break
                request = self._waiting.popleft()
                self._reserved_tokens += self._total(request)
                self._started.append([request, 0])
            one = self._started[position]
            request, start = one
            stop = min(start + room, tokens[request])
            seconds += costs.prefill_seconds(stop, start) - costs.prefill_base_seconds
            one[1] = stop
            room -= stop - start
            position += 1
        if not position:
            return False
        while self._started and self._started[0][1] == tokens[self._started[0][0]]:
            whole.append(self._started.popleft()[0])
        alone = batch.next_seconds() if len(batch) else 0.0
        # one launch for both: the longer base of the two
        base = max(costs.prefill_base_seconds, costs.decode_base_seconds if alone else 0.0)
        total = seconds + base + (alone - costs.decode_base_seconds if alone else 0.0)
        self.prefill_seconds += total - alone
        self._loop.at(self._loop.now + total, self._mixed, (total, whole))
        return True

    def _mixed(self, done: tuple[float, list[int]]) -> None:
        seconds, whole = done
        self._edge = self._loop.now
        if len(self.batch):
            self._finish(self.batch.advance_one(seconds))
        for request in whole:
            self._join(request)
        self._next()


class CoupledCluster:
    """One run of one workload."""

    def __init__(self, config: CoupledConfig, workload: Workload):
        self.config, self.workload = config, workload
        self.loop = EventLoop()
        self.ledger = Ledger(workload)
        self.nodes = [
            CoupledNode(
                self.loop,
                config,
                workload,
                joined=self._joiner(number),
                left=self._leaver(number),
                reused=self._reused,
            )
            for number in range(config.num_nodes)
        ]
        self._num_requests = [0] * config.num_nodes
        self._random = random.Random(config.seed)

    def run(self) -> Outcomes:
        """Serve everything. Raises UnaccountedError if a request is left over."""
        self.loop.run(self.workload.arrivals, self._dispatch)
        return self.ledger.close([node.batch.log for node in self.nodes])

    @property
    def gpu_seconds(self) -> float:
        """Of prompts, on all nodes together."""
        return sum(node.prefill_seconds for node in self.nodes)

    def _dispatch(self, request: int) -> None:
        number = self._choose(request)
        self._num_requests[number] += 1
        self.nodes[number].add(request)

    def _choose(self, request: int) -> int:
        if self.config.dispatch == "round_robin":
            return request % self.config.num_nodes
        if self.config.dispatch == "random":
            return self._random.randrange(self.config.num_nodes)
        fewest = min(self._num_requests)
        return self._random.choice([n for n, num in enumerate(self._num_requests) if num == fewest])

    def _joiner(self, number: int) -> Callable[[int, int], None]:
        ledger, loop = self.ledger, self.loop

        def joined(request: int, step: int) -> None:
            ledger.first_token_at[request] = loop.now
            ledger.node[request] = number
            ledger.first_step[request] = step
            # what held that step up before the request's first token is none of its own
            ledger.first_wait[request] = -self.nodes[number].batch.log.stalled(step)

        return joined

    def _leaver(self, number: int) -> Callable[[list[int]], None]:
        def left(requests: list[int]) -> None:
            self._num_requests[number] -= len(requests)
            for request in requests:
                self.ledger.end(request, State.FINISHED)

        return left

    def _reused(self, request: int, num_tokens: int) -> None:
        self.ledger.prefix_tokens[request] = num_tokens

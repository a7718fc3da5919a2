"""A disaggregated cluster that serves a trace: the Conductor's own decisions, simulated machines.

A request's way: it is placed when its scheduling is done; its prefix comes from another node or from SSD, if it
must; its prompt is computed; its KV goes to the decode node meanwhile, and is loaded there. That is the time of its first
token. The wait for the next step of the batch belongs to its first token interval.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, PrefixLengths, RequestFeatures
from mooncake_jax.conductor.schedule import schedule
from mooncake_jax.simulation.books import Books
from mooncake_jax.simulation.caches import Caches
from mooncake_jax.simulation.config import ClusterConfig, Failure
from mooncake_jax.simulation.decode import DecodeNode
from mooncake_jax.simulation.discipline import discipline
from mooncake_jax.simulation.events import EventLoop
from mooncake_jax.simulation.ledger import Ledger, Outcomes, State
from mooncake_jax.simulation.network import Network
from mooncake_jax.simulation.prefill import PrefillInstance
from mooncake_jax.simulation.workload import Workload

_UNLIMITED = 1 << 40


class Cluster:
    """One run of one workload."""

    def __init__(self, config: ClusterConfig, workload: Workload):
        costs = config.costs
        self.config, self.workload = config, workload
        self.loop = EventLoop()
        self.ledger = Ledger(workload)
        self.caches = Caches(
            config.num_prefill,
            (config.dram_tokens if config.dram_tokens is not None else costs.dram_tokens)
            // config.block_tokens
            * config.nodes_per_group,
            config.ssd_tokens // config.block_tokens * config.nodes_per_group,
            config.eviction,
            config.seed,
        )
        self.books = Books(
            config.num_prefill,
            config.num_decode,
            decode_slots=config.decode_slots,
            decode_tokens=costs.hbm_kv_tokens,
        )
        rate = config.nic_nbytes_per_second or costs.nic_nbytes_per_second
        self.network = Network(
            [rate * config.nodes_per_group] * config.num_prefill + [rate] * config.num_decode,
            costs.transfer_base_seconds,
        )
        take = discipline(
            config.discipline,
            tile_tokens=config.tile_tokens,
            tokens_per_second=1.0 / costs.prefill_seconds_per_token,
        )
        self.prefills = [
            PrefillInstance(
                number,
                self.loop,
                costs,
                take,
                started=self._started,
                ended=self._prefilled,
                num_stages=config.nodes_per_group,
                chunk_tokens=config.chunk_tokens,
            )
            for number in range(config.num_prefill)
        ]
        self.decodes = [
            DecodeNode(
                self.loop,
                costs,
                num_slots=config.decode_slots,
                capacity_tokens=costs.hbm_kv_tokens,
                joined=self._joiner(number),
                left=self._left,
            )
            for number in range(config.num_decode)
        ]
        self._schedule = ScheduleConfig(
            policy=config.policy,
            balancing_threshold=config.balancing_threshold,
            ttft_slo_seconds=config.ttft_slo_seconds,
            tbt_slo_seconds=config.tbt_slo_seconds,
            max_waiting_prompts=_UNLIMITED,
            cost=costs.estimator(),
        )
        self._block_tokens = config.block_tokens
        self._block_nbytes = int(costs.kv_nbytes(config.block_tokens))
        self._ssd_seconds = self._block_nbytes / costs.ssd_nbytes_per_second
        self._random = random.Random(config.seed).random
        num = len(workload)
        self._pair: list[tuple[int, int]] = [(-1, -1)] * num
        self._at_prefill = [False] * num
        self._attempt = [0] * num
        self._forecast_seconds = [0.0] * num
        self._source = [(-1, 0)] * num  # of a prefix that is fetched, and the blocks that were here
        self._streamed_at = [0.0] * num
        self._dead_prefill: set[int] = set()
        self._dead_decode: set[int] = set()

    def run(self, sample: Callable[[float], None] | None = None, sample_seconds: float = 30.0) -> Outcomes:
        """Serve everything. `sample(now)` is called every `sample_seconds` until the last arrival.

        Raises UnaccountedError if a request is left over.
        """
        delay = self.config.costs.scheduling_seconds
        times = [arrival + delay for arrival in self.workload.arrivals]
        for failure in self.config.failures:
            self.loop.at(failure.at_seconds, self._die, failure)
        if sample is not None and times:
            for index in range(int(times[-1] / sample_seconds) + 1):
                self.loop.at(index * sample_seconds, sample, index * sample_seconds)
        collects = gc.isenabled()
        gc.disable()  # nothing here is cyclic, and there are millions of small objects
        try:
            self.loop.run(times, self._place)
        finally:
            if collects:
                gc.enable()
        return self.ledger.close([node.batch.log for node in self.decodes])

    @property
    def gpu_seconds(self) -> float:
        """Of all prefill nodes together."""
        return sum(prefill.busy_seconds for prefill in self.prefills)

    def _place(self, request: int) -> None:
        workload, now = self.workload, self.loop.now
        keys = workload.chains[request] if self.config.reuse else ()
        num_tokens = workload.num_tokens[request]
        draw = self._random
        local, best, holder = self.caches.match(keys, draw())
        decision = schedule(
            self.books.view(),
            RequestFeatures(
                num_tokens, workload.num_outputs[request], self._block_tokens, self._block_nbytes
            ),
            PrefixLengths(local, best, ""),
            self._schedule,
            now=now,
            draws=(draw(), draw()),
        )
        if decision.outcome != "placed":
            gone = decision.outcome in ("no_prefill", "no_decode", "too_long")
            self.ledger.end(request, State.FAILED if gone else State.REJECTED)
            return
        self._book(request, decision, now)
        p, num_local = decision.prefill, int(local[decision.prefill])
        ready, reused = now, decision.local_blocks
        if decision.fetch_blocks:
            nbytes = (decision.fetch_blocks - reused) * self._block_nbytes
            ready = self.network.send(holder, p, nbytes, now)
            self._source[request] = (holder, reused)
            reused = decision.fetch_blocks
        num_read = self.caches.use(p, keys, num_local)
        if num_read:
            ready = max(ready, now + num_read * self._ssd_seconds)
        self.ledger.prefix_tokens[request] = reused * self._block_tokens
        if ready > now:
            self.loop.at(ready, self._ready, (request, self._attempt[request]))
        else:
            self.prefills[p].add(request, num_tokens, reused * self._block_tokens)

    def _book(self, request: int, decision: Decision, now: float) -> None:
        p, d = decision.prefill, decision.decode
        num_tokens = self.workload.num_tokens[request]
        self._pair[request] = (p, d)
        self._at_prefill[request] = True
        self._forecast_seconds[request] = decision.prefill_seconds
        self.books.place(p, decision.prefill_seconds, max(now, self.prefills[p].free_at))
        self.books.reserve(d, num_tokens, num_tokens + self.workload.num_outputs[request])

    def _ready(self, booked: tuple[int, int]) -> None:
        request, attempt = booked
        if attempt != self._attempt[request]:
            return
        ledger, (holder, num_local) = self.ledger, self._source[request]
        if holder >= 0:
            if holder in self._dead_prefill:  # what was fetched is lost with it
                ledger.prefix_tokens[request] = num_local * self._block_tokens
            else:
                ledger.fetched_tokens[request] = (
                    ledger.prefix_tokens[request] - num_local * self._block_tokens
                )
        p, _ = self._pair[request]
        self.prefills[p].add(request, self.workload.num_tokens[request], ledger.prefix_tokens[request])

    def _started(self, prefill: int, requests: list[int]) -> None:
        # their KV goes to decode from now on, layer by layer; it cannot be there before the pass ends
        now, workload, config = self.loop.now, self.workload, self.config
        seconds = 0.0
        for request in requests:
            seconds += self._forecast_seconds[request]
            nbytes = config.costs.kv_nbytes(workload.num_tokens[request])
            target = config.num_prefill + self._pair[request][1]
            self._streamed_at[request] = arrived = self.network.send(prefill, target, nbytes, now)
            self.ledger.transfer_seconds[request] = arrived - now
        self.books.begin(prefill, seconds, self.prefills[prefill].free_at)

    def _prefilled(self, prefill: int, requests: list[int]) -> None:
        self.books.prefilled(prefill, len(requests))
        now, workload, costs = self.loop.now, self.workload, self.config.costs
        for request in requests:
            self._at_prefill[request] = False
            if self.config.reuse:
                self.caches.computed(prefill, workload.chains[request])
            if self._pair[request][1] in self._dead_decode:
                self._again(request)
                continue
            if self.config.first_token == "prefilled":
                self.ledger.first_token_at[request] = now
            arrived = max(now, self._streamed_at[request])
            loaded = arrived + costs.load_seconds(workload.num_tokens[request])
            self.loop.at(loaded, self._arrived, request)

    def _arrived(self, request: int) -> None:
        d = self._pair[request][1]
        if d in self._dead_decode:
            self._again(request)
            return
        if self.config.first_token == "loaded":
            self.ledger.first_token_at[request] = self.loop.now
        num_steps = self.workload.num_outputs[request] - 1
        if num_steps:
            self.decodes[d].add(request, self.workload.num_tokens[request], num_steps)
        else:
            self._left([request])

    def _joiner(self, decode: int) -> Callable[[int, int], None]:
        ledger, loop = self.ledger, self.loop

        def joined(request: int, step: int) -> None:
            ledger.first_wait[request] = loop.now - ledger.first_token_at[request]
            ledger.node[request] = decode
            ledger.first_step[request] = step

        return joined

    def _left(self, requests: list[int]) -> None:
        for request in requests:
            self._release(request)
            self.ledger.end(request, State.FINISHED)

    def _release(self, request: int) -> None:
        num_tokens = self.workload.num_tokens[request]
        d = self._pair[request][1]
        self.books.release(d, num_tokens, num_tokens + self.workload.num_outputs[request])

    def _again(self, request: int) -> None:
        # before its first token: it is tried elsewhere, as the frontend does
        self._release(request)
        self._at_prefill[request] = False
        self._attempt[request] += 1
        self._source[request] = (-1, 0)
        self._place(request)

    def _die(self, failure: Failure) -> None:
        role, number = failure.role, failure.number
        dead = self._dead_prefill if role == "prefill" else self._dead_decode
        if number in dead:
            return
        dead.add(number)
        self.books.die(role, number)
        if role == "decode":  # what has a token is lost; what comes later finds it dead
            for request in self.decodes[number].die():
                self._release(request)
                self.ledger.end(request, State.FAILED)
            return
        self.caches.forget(number)
        self.prefills[number].die()
        for request, (p, _) in enumerate(self._pair):
            if p == number and self._at_prefill[request]:
                self._again(request)


def simulate(config: ClusterConfig, workload: Workload) -> Outcomes:
    """Serve `workload` on a cluster of `config`. Raises UnaccountedError if a request is left over."""
    return Cluster(config, workload).run()

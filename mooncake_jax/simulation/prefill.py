"""A prefill instance: a queue, passes over it, and, for a group of nodes, chunked pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mooncake_jax.cost_model import NodeCosts
from mooncake_jax.simulation.discipline import Discipline, Waiting
from mooncake_jax.simulation.events import EventLoop


class PrefillInstance:
    """Computes what waits, a pass at a time.

    `started(instance, requests, now)` is called at the beginning of the pass that ends these requests,
    `ended(instance, requests)` at its end. A group of `num_stages` nodes has every layer once: a node computes its
    share of a chunk while the one before is at the next chunk, so the next pass begins when the first node is free.
    """

    def __init__(
        self,
        number: int,
        loop: EventLoop,
        costs: NodeCosts,
        discipline: Discipline,
        *,
        started: Callable[[int, list[int]], None],
        ended: Callable[[int, list[int]], None],
        num_stages: int = 1,
        chunk_tokens: int = 4096,
    ):
        self.number = number
        self.busy_seconds = 0.0
        self.free_at = 0.0  # when the next pass can begin
        self._loop, self._costs, self._discipline = loop, costs, discipline
        self._started, self._ended = started, ended
        self._waiting: list[Waiting] = []
        self._chunk_tokens = chunk_tokens
        self._stages_free = [0.0] * num_stages
        self._idle = True
        self._dead = False

    def add(self, request: int, num_tokens: int, num_prefix: int) -> None:
        """The prefix of `request` is there; it may compute."""
        now = self._loop.now
        self._waiting.append(Waiting(request, num_tokens, num_prefix, num_prefix, now))
        if self._idle:
            self._begin()

    def die(self) -> None:
        """No pass ends any more."""
        self._dead = True

    def _begin(self) -> None:
        now, waiting, costs = self._loop.now, self._waiting, self._costs
        chosen = self._discipline(waiting, now)
        self._idle = False
        seconds, ended, whole = costs.prefill_base_seconds, [], []
        for position, stop in chosen:
            one = waiting[position]
            seconds += self._tokens_seconds(one, stop)
            one.num_done = stop
            if stop == one.num_tokens:
                ended.append(one.request)
                whole.append(position)
        if len(whole) == len(waiting):
            waiting.clear()
        else:
            for position in reversed(whole):
                del waiting[position]
            for position, _ in chosen if not whole else ():
                waiting[position].served_seconds += seconds
        self.busy_seconds += seconds
        if len(self._stages_free) == 1:
            self.free_at = end = now + seconds
        else:
            self.free_at, end = self._pipelined(now, seconds, sum(stop for _, stop in chosen))
        if ended:
            self._started(self.number, ended)
        if end == self.free_at:
            self._loop.at(end, self._end_and_next, ended)
        else:
            self._loop.at(self.free_at, self._next, None)
            if ended:
                self._loop.at(end, self._end, ended)

    def _tokens_seconds(self, one: Waiting, stop: int) -> float:
        # of a prompt's tokens from `num_done` to `stop`; the load of its prefix with the first of them
        costs, start = self._costs, one.num_done
        prefix = one.num_prefix if start == one.num_prefix else 0
        return (stop - start) * (
            costs.prefill_seconds_per_token + costs.prefill_seconds_per_pair * 0.5 * (stop + start)
        ) + costs.prefill_seconds_per_prefix_token * prefix

    def _pipelined(self, now: float, seconds: float, num_tokens: int) -> tuple[float, float]:
        # when the first stage is free and when the last is done; chunks share the time evenly
        stages = self._stages_free
        num_chunks = -(-num_tokens // self._chunk_tokens)
        each = seconds / (num_chunks * len(stages))
        for _ in range(num_chunks):
            ready = now
            for stage, free in enumerate(stages):
                ready = stages[stage] = max(ready, free) + each
        return stages[0], stages[-1]

    def _end_and_next(self, ended: Sequence[int]) -> None:
        self._end(ended)
        self._next(None)

    def _end(self, ended: Sequence[int]) -> None:
        if self._dead or not ended:
            return
        self._ended(self.number, list(ended))

    def _next(self, _: None) -> None:
        if self._dead:
            return
        self._idle = True
        if self._waiting:
            self._begin()

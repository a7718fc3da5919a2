"""The simulator's books of a run that was recorded: from its arrivals and completions alone.

A decision of the running Conductor rests on heartbeats, announced blocks and measured links. `Rebuilt` is told none of
these: who arrived when, where that request went, and when its phases were over. What it decides then, and where that
differs from what was recorded, says how far the simulator's view of a cluster is from a real Conductor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_jax.conductor import estimate
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, PrefixLengths, RequestFeatures
from mooncake_jax.conductor.policy import POLICIES
from mooncake_jax.conductor.schedule import forecast_prefill, schedule
from mooncake_jax.conductor.view import ClusterView
from mooncake_jax.messages import RequestEnd
from mooncake_jax.simulation.books import Books
from mooncake_jax.simulation.caches import Caches


@dataclass(frozen=True)
class Arrival:
    """A request that asks for a place. `draws` are those that broke ties among instances when it was recorded."""

    request_id: str
    now: float
    features: RequestFeatures
    chain: Sequence[int]  # ids of the prompt's full blocks
    draws: tuple[float, float]


@dataclass(slots=True, eq=False)
class _Booked:
    prefill: int
    decode: int
    num_tokens: int
    total_tokens: int
    prefill_seconds: float  # forecast
    learns: bool  # no transfer was waited for, so its time corrects the forecasts
    chain: Sequence[int]


class Rebuilt:
    """`num_prefill` and `num_decode` instances that never change, each with a home node of `dram_blocks`."""

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        num_prefill: int,
        num_decode: int,
        decode_slots: int,
        decode_tokens: int,
        dram_blocks: int,
    ):
        self.config = config
        self.books = Books(num_prefill, num_decode, decode_slots=decode_slots, decode_tokens=decode_tokens)
        self.caches = Caches(num_prefill, dram_blocks)
        self._factors = [1.0] * num_prefill
        self._open: dict[str, _Booked] = {}
        self._queues: list[dict[str, _Booked]] = [{} for _ in range(num_prefill)]  # the first one runs
        self._free_at = [0.0] * num_prefill

    def decide(self, arrival: Arrival) -> tuple[Decision, PrefixLengths, ClusterView]:
        """What the simulator would do with it, and from what. Books nothing."""
        local, best, _ = self.caches.match(arrival.chain, 0.0)
        lengths, view = PrefixLengths(local, best, ""), self.books.view()
        decision = schedule(
            view, arrival.features, lengths, self.config, now=arrival.now, draws=arrival.draws
        )
        return decision, lengths, view

    def placed(self, arrival: Arrival, lengths: PrefixLengths, decision: Decision) -> None:
        """It went where the recorded `decision` says."""
        p, d, features = decision.prefill, decision.decode, arrival.features
        fetches = POLICIES[self.config.policy].fetches
        forecast = forecast_prefill(
            self.books.view().prefill, features, lengths, self.config, now=arrival.now, fetches=fetches
        )
        booked = self._open[arrival.request_id] = _Booked(
            p,
            d,
            features.num_tokens,
            features.total_tokens,
            forecast.prefill_seconds.item(p),
            not decision.fetch_blocks,
            arrival.chain,
        )
        queue = self._queues[p]
        self.books.place(p, booked.prefill_seconds, max(arrival.now, self._free_at[p]))
        queue[arrival.request_id] = booked
        if len(queue) == 1:
            self._begin(p, booked, arrival.now)
        self.books.reserve(d, booked.num_tokens, booked.total_tokens)
        self.caches.use(p, arrival.chain, lengths.local.item(p))

    def ended(self, end: RequestEnd, now: float) -> None:
        """A phase is over. Phases of requests that were never placed, or have ended, are ignored."""
        booked = self._open.get(end.request_id)
        if booked is None:
            return
        if end.phase in ("prefill", "all"):
            self._end_prefill(end, booked, now)
        if end.phase in ("decode", "all"):
            del self._open[end.request_id]
            self.books.release(booked.decode, booked.num_tokens, booked.total_tokens)

    def _end_prefill(self, end: RequestEnd, booked: _Booked, now: float) -> None:
        p = booked.prefill
        queue = self._queues[p]
        if end.request_id not in queue:
            return
        running = next(iter(queue)) == end.request_id
        del queue[end.request_id]
        self.books.prefilled(p, 1)
        if running and queue:
            self._begin(p, next(iter(queue.values())), now)
        elif running:
            self._free_at[p] = now
            self.books.begin(p, 0.0, now)
        else:  # it overtook the one that runs, which ends so much later
            self._free_at[p] += booked.prefill_seconds
            self.books.begin(p, booked.prefill_seconds, self._free_at[p])
        if not (end.ok and end.phase == "prefill"):
            return
        self.caches.computed(p, booked.chain)
        if booked.learns:
            self._factors[p] = estimate.corrected(
                self._factors[p], forecast_seconds=booked.prefill_seconds, measured_seconds=end.seconds
            )
            self.books.learn("prefill", p, self._factors[p])

    def _begin(self, p: int, booked: _Booked, now: float) -> None:
        self._free_at[p] = now + booked.prefill_seconds
        self.books.begin(p, booked.prefill_seconds, self._free_at[p])

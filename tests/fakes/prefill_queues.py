"""Prefill nodes as queues: each computes what it is given, first come first served, in exactly the modelled time.

They hold real keys in the conductor's index, beat once a second, and report every end, so that a `Cluster` of the
conftest can be put under load with time as a number.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from kvstore.errors import RefusedError

HEARTBEAT_SECONDS = 1.0


@dataclass
class Served:
    """One request that was placed."""

    node: str
    arrived_at: float
    ttft_seconds: float
    reused_blocks: int
    num_blocks: int


class Load:
    """Sends requests to a `Cluster` at their times; `served` and `refused` say what became of them."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.served: list[Served] = []
        self.refused: list[tuple[float, float]] = []  # when, and for how long
        self._free_at: dict[str, float] = {}
        self._queued: dict[
            str, dict[str, tuple[float, int]]
        ] = {}  # node: request: (done at, tokens to compute)
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._next_beat = cluster.now

    def send(self, at: float, tokens, max_tokens: int = 1) -> None:
        """One request at clock time `at`."""
        heapq.heappush(self._events, (at, next(self._order), (list(tokens), max_tokens)))

    def run(self) -> None:
        """Until everything sent has been answered or refused."""
        while self._events:
            at, _, what = heapq.heappop(self._events)
            while self._next_beat <= at:
                self.cluster.now = self._next_beat
                self._beat()
                self._next_beat += HEARTBEAT_SECONDS
            self.cluster.now = at
            if isinstance(what, tuple):
                self._arrive(*what)
            else:
                what()

    def counts(self) -> list[int]:
        """Requests per prefill node."""
        names = [name for name in self.cluster.names if name.startswith("p")]
        return [sum(one.node == name for one in self.served) for name in names]

    def _arrive(self, tokens: list[int], max_tokens: int) -> None:
        cluster, now = self.cluster, self.cluster.now
        keys = cluster.keys(tokens)
        try:
            placement = cluster.place(tokens, max_tokens)
        except RefusedError as error:
            self.refused.append((now, error.retry_after_seconds))
            return
        name, home = placement.prefill.name, placement.prefill.name + "-home"
        usable = (len(tokens) - 1) // 16
        start = max(self._free_at.get(name, now), now)
        held = cluster.index.lengths(keys)
        reused = min(max(held.get(home, 0), placement.local_blocks, placement.fetch_blocks), usable)
        computed = len(tokens) - 16 * reused
        done = start + cluster.config.schedule.cost.prefill_seconds(len(tokens), float(16 * reused))
        self._free_at[name] = done
        self._queued.setdefault(name, {})[placement.request_id] = (done, computed)
        self.served.append(Served(name, now, done - now, reused, usable))

        def finish() -> None:
            self._queued[name].pop(placement.request_id)
            cluster.index.add(home, keys)
            cluster.end(placement.request_id, "prefill", seconds=done - start)
            cluster.end(placement.request_id, "decode")

        heapq.heappush(self._events, (done, next(self._order), finish))

    def _beat(self) -> None:
        for name in self.cluster.names:
            queued = self._queued.get(name, {}) if name.startswith("p") else {}
            self.cluster.beat(
                name,
                request_ids=list(queued),
                used_slots=min(len(queued), 8),
                queued_tokens=sum(self._left(done, tokens) for done, tokens in queued.values()),
            )

    def _left(self, done_at: float, num_tokens: int) -> int:
        """Tokens of a request that are not computed yet."""
        seconds = self.cluster.config.schedule.cost.prefill_seconds(num_tokens, 0.0)
        return int(num_tokens * min(max((done_at - self.cluster.now) / seconds, 0.0), 1.0))

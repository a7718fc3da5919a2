"""How fast blocks move between nodes: an EWMA of what each pair achieved, and what a sender has in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_jax.conductor.decision import Link
from mooncake_jax.conductor.estimate import CostModel

_WEIGHT = 0.3  # of the newest transfer
_BOUND = 256.0  # a pair is at most this many times faster or slower than the model
_MEMORY_SECONDS = 300.0  # then 1/e of what a pair achieved still counts: unused links are tried again


@dataclass(slots=True)
class _Pair:
    log_ratio: float  # of achieved over modelled seconds
    at: float

    def log_ratio_at(self, now: float) -> float:
        return self.log_ratio * math.exp(min(self.at - now, 0.0) / _MEMORY_SECONDS)


class Links:
    """Achieved over modelled transfer time per (sending node, receiving instance), forgotten slowly."""

    def __init__(self, cost: CostModel):
        self._cost = cost
        self._pairs: dict[str, dict[str, _Pair]] = {}

    def learn(self, sender: str, receiver: str, *, nbytes: int, seconds: float, now: float) -> None:
        """`nbytes` from `sender` took `seconds` to arrive at `receiver`. Too little to tell is ignored."""
        idle = self._cost.idle_link
        expected = nbytes * idle.seconds_per_nbyte
        if expected < idle.start_seconds or expected <= 0.0 or not (0.0 < seconds < math.inf):
            return
        ratio = min(max(seconds / expected, 1 / _BOUND), _BOUND)
        pairs = self._pairs.setdefault(sender, {})
        pair = pairs.get(receiver)
        before = pair.log_ratio_at(now) if pair else 0.0
        weight = _WEIGHT if pair else 1.0
        pairs[receiver] = _Pair(before + weight * (math.log(ratio) - before), now)

    def forget(self, name: str) -> None:
        """A node or instance is gone."""
        self._pairs.pop(name, None)
        for pairs in self._pairs.values():
            pairs.pop(name, None)

    def link(
        self,
        sender: str,
        receivers: Sequence[str],
        in_flight_nbytes: float,
        now: float,
        *,
        ssd_nbytes: float = 0.0,
    ) -> Link | None:
        """From `sender` to each of `receivers`, behind what it sends already and reads from SSD first; None: as the
        model says.

        A pair that was never measured is as fast as the model; what is in flight leaves at the sender's mean rate.
        """
        pairs = self._pairs.get(sender)
        idle = self._cost.idle_link
        if not pairs:
            if in_flight_nbytes <= 0.0 and ssd_nbytes <= 0.0:
                return None
            delay = in_flight_nbytes * idle.seconds_per_nbyte + ssd_nbytes / self._cost.ssd_nbytes_per_second
            return Link(idle.start_seconds + delay, idle.seconds_per_nbyte)
        ratios = np.ones(len(receivers))
        for slot, receiver in enumerate(receivers):
            if receiver in pairs:
                ratios[slot] = math.exp(pairs[receiver].log_ratio_at(now))
        mean = math.exp(sum(pair.log_ratio_at(now) for pair in pairs.values()) / len(pairs))
        delay = in_flight_nbytes * idle.seconds_per_nbyte * mean
        delay += ssd_nbytes / self._cost.ssd_nbytes_per_second
        return Link(idle.start_seconds + delay, ratios * idle.seconds_per_nbyte)

    def forecast_seconds(self, sender: str, receiver: str, nbytes: int, now: float) -> float:
        """How long `nbytes` would take with nothing else in flight."""
        pair = self._pairs.get(sender, {}).get(receiver)
        ratio = math.exp(pair.log_ratio_at(now)) if pair else 1.0
        idle = self._cost.idle_link
        return float(idle.start_seconds + ratio * nbytes * idle.seconds_per_nbyte)

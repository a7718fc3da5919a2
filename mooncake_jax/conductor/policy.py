"""Ways to choose a prefill instance, behind one signature: the lowest score wins, ties are drawn.

The paper's Figure 5 compares `random`, `load`, `local` and `global`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from mooncake_jax.conductor.estimate import PrefillForecast
from mooncake_jax.conductor.view import PrefillColumns

PolicyName = Literal["global", "global_cost", "local", "load", "load_seconds", "random"]
Fetches = Literal["never", "by_ratio", "by_cost"]


class Policy(NamedTuple):
    """When a better prefix is fetched from elsewhere, and `score(forecast, instances) -> [P]`."""

    fetches: Fetches
    score: Callable[[PrefillForecast, PrefillColumns], np.ndarray]


def _shortest_ttft(forecast: PrefillForecast, instances: PrefillColumns) -> np.ndarray:
    return forecast.ttft_seconds


def _fewest_requests(forecast: PrefillForecast, instances: PrefillColumns) -> np.ndarray:
    return instances.num_requests


def _shortest_queue(forecast: PrefillForecast, instances: PrefillColumns) -> np.ndarray:
    return forecast.queue_seconds


def _all_equal(forecast: PrefillForecast, instances: PrefillColumns) -> np.ndarray:
    return np.zeros(len(instances.rows))


POLICIES: dict[PolicyName, Policy] = {
    "global": Policy("by_ratio", _shortest_ttft),  # Algorithm 1 as published
    "global_cost": Policy("by_cost", _shortest_ttft),  # fetch where that is faster than to recompute
    "local": Policy("never", _shortest_ttft),  # §4.1: prefill time with the own prefix, and the queue
    "load": Policy("never", _fewest_requests),  # assigned requests
    "load_seconds": Policy("never", _shortest_queue),  # the work they are
    "random": Policy("never", _all_equal),
}

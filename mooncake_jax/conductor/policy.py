"""Ways to choose a prefill instance, behind one signature: the lowest score wins, ties are drawn.

The paper's Figure 5 compares them. All but `global` use only what an instance holds itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from mooncake_jax.conductor.estimate import PrefillForecast
from mooncake_jax.conductor.view import PrefillColumns

PolicyName = Literal["global", "local", "load_balance", "random"]


class Policy(NamedTuple):
    """`fetches`: a better prefix may be fetched from elsewhere. `score(forecast, instances) -> [P]`."""

    fetches: bool
    score: Callable[[PrefillForecast, PrefillColumns], np.ndarray]


def _shortest_ttft(forecast: PrefillForecast, instances: PrefillColumns) -> np.ndarray:
    return forecast.ttft_seconds


def _fewest_requests(forecast: PrefillForecast, instances: PrefillColumns) -> np.ndarray:
    return instances.num_requests


def _all_equal(forecast: PrefillForecast, instances: PrefillColumns) -> np.ndarray:
    return np.zeros(len(instances.names))


POLICIES: dict[PolicyName, Policy] = {
    "global": Policy(fetches=True, score=_shortest_ttft),  # Algorithm 1
    "local": Policy(fetches=False, score=_shortest_ttft),
    "load_balance": Policy(fetches=False, score=_fewest_requests),
    "random": Policy(fetches=False, score=_all_equal),
}

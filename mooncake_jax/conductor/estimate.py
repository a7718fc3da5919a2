"""What a request would cost: prefill, queue, transfer and token interval, as plain polynomials.

Every function takes scalars or arrays alike. Seconds, bytes and tokens throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from mooncake_jax.conductor.decision import Link

Cost = Annotated[float, Meta(ge=0.0, le=1e9)]
Rate = Annotated[float, Meta(gt=0.0)]
Number = TypeVar("Number", float, np.ndarray)

FACTOR_BOUNDS = (1 / 16, 16.0)
_STEP_BOUNDS = (1 / 4, 4.0)
_STEP_WEIGHT = 0.1
_LOWEST_RATE = 1e-3


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the estimators (paper §4.1: polynomial regression on offline data).

    The defaults are deliberately slow (a small CPU): an untuned Conductor forecasts late rather than early.
    """

    prefill_base_seconds: Cost = 0.01
    prefill_seconds_per_token: Cost = 1e-3  # linear layers, per computed token
    prefill_seconds_per_pair: Cost = 1e-8  # attention, per (query, key) pair
    prefill_seconds_per_prefix_token: Cost = 1e-6  # loading a reused token into the device
    transfer_base_seconds: Cost = 2e-3
    transfer_nbytes_per_second: Rate = 1e9
    ssd_nbytes_per_second: Rate = 5e8  # of a sender that has the blocks on SSD only, before they leave
    tbt_base_seconds: Cost = 0.02
    tbt_seconds_per_request: Cost = 2e-3
    tbt_seconds_per_kv_token: Cost = 1e-7

    def prefill_seconds(self, num_tokens: float, num_prefix: Number) -> Number:
        """EstimatePrefillExecutionTime: a prompt of `num_tokens` of which `num_prefix` are reused.

        The whole prompt attends to (query, key) pairs of num_tokens² / 2; reuse saves those of its prefix.
        """
        seconds_per_square = 0.5 * self.prefill_seconds_per_pair
        whole = (
            self.prefill_base_seconds
            + self.prefill_seconds_per_token * num_tokens
            + seconds_per_square * num_tokens**2
        )
        saved_per_token = self.prefill_seconds_per_token - self.prefill_seconds_per_prefix_token
        return whole - num_prefix * (saved_per_token + seconds_per_square * num_prefix)

    def prefill_seconds_by_blocks(self, num_tokens: int, block_tokens: int, num_blocks: int) -> np.ndarray:
        """`[num_blocks + 1]`: `prefill_seconds` by the number of reused blocks."""
        length = 1 << num_blocks.bit_length()
        saved = _saved_seconds(
            self.prefill_seconds_per_token - self.prefill_seconds_per_prefix_token,
            0.5 * self.prefill_seconds_per_pair,
            block_tokens,
            length,
        )
        return self.prefill_seconds(num_tokens, 0.0) - saved[: num_blocks + 1]

    def transfer_seconds(self, nbytes: Number) -> Number:
        """EstimateKVCacheTransferTime: `nbytes` from one other node."""
        return self.transfer_base_seconds + nbytes * (1.0 / self.transfer_nbytes_per_second)

    def slowed(self, times: float) -> CostModel:
        """What engines compute takes `times` as long; transfers stay as they are (emulated engines)."""
        names = (name for name in self.__struct_fields__ if name.startswith(("prefill_", "tbt_")))
        return msgspec.structs.replace(self, **{name: getattr(self, name) * times for name in names})

    @property
    def idle_link(self) -> Link:
        """`transfer_seconds` as a link, from a sender that sends nothing else."""
        return Link(self.transfer_base_seconds, 1.0 / self.transfer_nbytes_per_second)

    def queue_seconds(
        self,
        queued_tokens: int,
        tokens_per_second: float,
        factor: float,
        booked: Iterable[tuple[int, float]] = (),
    ) -> float:
        """EstimatePrefillQueueTime: the time that `queued_tokens` of uncached prompt at an instance take.

        `booked` has the tokens to compute and the forecast seconds of each request that the instance told of and we
        know: the queue takes their sum, less in proportion to the tokens that are done. Tokens beyond these are
        others': they go at the measured rate or (rate 0) the modelled one.
        """
        known_tokens = known_seconds = 0.0
        for num_tokens, seconds in booked:
            known_tokens += num_tokens
            known_seconds += seconds
        if queued_tokens <= known_tokens:
            return known_seconds * queued_tokens / known_tokens if queued_tokens else 0.0
        others = queued_tokens - known_tokens
        if tokens_per_second > 0.0:
            return known_seconds + others / max(tokens_per_second, _LOWEST_RATE)
        return known_seconds + others * self.prefill_seconds_per_token * factor

    def tbt_seconds(self, batch: Number, kv_tokens: Number) -> Number:
        """Token interval of a decode batch of `batch` requests that hold `kv_tokens` tokens together."""
        return (
            self.tbt_base_seconds
            + self.tbt_seconds_per_request * batch
            + self.tbt_seconds_per_kv_token * kv_tokens
        )


@lru_cache(maxsize=64)
def _saved_seconds(
    seconds_per_token: float, seconds_per_square: float, block_tokens: int, length: int
) -> np.ndarray:
    prefix = np.arange(0.0, length * block_tokens, block_tokens)
    saved = prefix * (seconds_per_token + seconds_per_square * prefix)
    saved.flags.writeable = False
    return saved


class PrefillForecast(NamedTuple):
    """One request at each prefill instance, `[P]`; TTFT is the sum of the three times."""

    fetch: np.ndarray  # bool: the prefix comes from the best holder
    transfer_seconds: np.ndarray
    queue_seconds: np.ndarray
    prefill_seconds: np.ndarray
    ttft_seconds: np.ndarray


def corrected(factor: float, *, forecast_seconds: float, measured_seconds: float) -> float:
    """The next correction factor of an instance whose forecast (made with `factor`) is now measured.

    One step moves at most `4 ** 0.1` and the factor stays in `FACTOR_BOUNDS`, so that no outlier can spoil
    it.
    """
    if not (forecast_seconds > 0.0 and measured_seconds > 0.0 and math.isfinite(measured_seconds)):
        return factor
    low, high = _STEP_BOUNDS
    step = min(max(measured_seconds / forecast_seconds, low), high) ** _STEP_WEIGHT
    return min(max(factor * step, FACTOR_BOUNDS[0]), FACTOR_BOUNDS[1])


def busy_until(
    reported_at: float,
    reported_seconds: float,
    unseen: Iterable[tuple[float, float]],
    served_at: float = -math.inf,
) -> float:
    """When a prefill instance will have done all it has: what its heartbeat said, then each later booking.

    `unseen` holds (booked at, seconds) in order of time. The queue at `now` is `max(0, busy_until - now)`, so
    it drains by itself between heartbeats. `served_at`: when it last ended a prompt; what is left begins no sooner.
    """
    until = max(reported_at + reported_seconds, served_at)
    for booked_at, seconds in unseen:
        until = max(until, booked_at) + seconds
    return until

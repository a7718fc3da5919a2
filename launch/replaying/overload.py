"""Overload on a running cluster: what 1× is, what SLO is fair, and what became of five times as much.

1× is the rate at which 90 % of requests meet both SLOs without any admission; the SLOs are four times the medians of
a cluster that has one request at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from launch.figures.result import REPORT, Gate, Row, at_least, at_most
from launch.replaying.outcome import Outcome, Slo, summarize
from launch.replaying.prompts import Line

SLO_FACTOR = 4.0
SHARE_WITHIN = 0.9
Send = Callable[[list[Line]], list[Outcome]]


class Shape(msgspec.Struct, frozen=True):
    """Every request: different prompts of equal length, token ids below `vocab_size`."""

    num_tokens: int
    num_outputs: int
    vocab_size: int


def poisson(rate: float, start: float, seconds: float, shape: Shape, rng: np.random.Generator) -> list[Line]:
    """Requests at `rate` a second over [start, start + seconds)."""
    num = rng.poisson(rate * seconds)
    times = np.sort(rng.uniform(start, start + seconds, num)).tolist()
    prompts = rng.integers(0, shape.vocab_size, (num, shape.num_tokens)).tolist()
    return [
        Line(i, at, tokens, shape.num_outputs)
        for i, (at, tokens) in enumerate(zip(times, prompts, strict=True))
    ]


def fair_slo(alone: Sequence[Outcome]) -> Slo:
    """Four times the medians of requests that had the cluster to themselves. Raises ValueError if one failed."""
    if not alone or any(one.status != "ok" for one in alone):
        raise ValueError("a request failed that had the cluster to itself")
    ttft = float(np.median([one.ttft_seconds for one in alone]))
    tbt = float(np.median([one.mean_tbt_seconds for one in alone]))
    return Slo(SLO_FACTOR * ttft, SLO_FACTOR * tbt)


def find_rate(send: Callable[[float], list[Outcome]], slo: Slo, first: float, *, steps: int = 4) -> float:
    """The highest rate tried at which `SHARE_WITHIN` of the requests met `slo`: doubled from `first`, then halved in.

    `send(rate)` tries one. Raises ValueError when even `first` / 8 is too much.
    """

    def holds(rate: float) -> bool:
        return summarize(send(rate), slo).goodput >= SHARE_WITHIN

    low = first
    while not holds(low):
        low /= 2.0
        if low < first / 8.0:
            raise ValueError(
                f"{SHARE_WITHIN:.0%} do not meet {slo} at {2.0 * low:g} requests a second either"
            )
    high = 2.0 * low
    while holds(high):
        low, high = high, 2.0 * high
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def recovery_seconds(outcomes: Sequence[Outcome], slo: Slo, load_ends: float) -> float:
    """From the end of the overload to the last arrival that was refused or missed its SLO; 0 if there is none."""
    late = [one.at_seconds for one in outcomes if one.at_seconds > load_ends and not slo.met_by(one)]
    return max(late, default=load_ends) - load_ends


def rows(
    once: Sequence[Outcome], overload: Sequence[Outcome], slo: Slo, rate: float, load_ends: float
) -> list[Row]:
    """The verdicts. `once`: a run at 1×; `overload`: one at 5× until `load_ends`, then at half of 1×."""
    loaded = [one for one in overload if one.at_seconds <= load_ends]
    got, at_once = summarize(loaded, slo), summarize(once, slo)
    once_seconds = max((one.at_seconds for one in once), default=1.0)
    goodput = got.num_within_slo / load_ends
    goodput_once = at_once.num_within_slo / once_seconds
    found: list[Row] = []

    def add(quantity: str, unit: str, value: float, gate: Gate = REPORT) -> None:
        found.append(Row(quantity, unit, math.nan, value, gate, value, value))

    add("1×: rate at which 90 % meet both SLOs", "requests/s", rate)
    add("TTFT SLO, 4× the unloaded median", "s", slo.ttft_seconds)
    add("TBT SLO, 4× the unloaded median", "s", slo.tbt_seconds)
    add("arrivals under overload", "requests", float(got.num_arrivals))
    add("refused (429)", "requests", float(got.num_rejected))
    add("failed", "requests", float(got.num_failed), at_most(0.0))
    add("429s without Retry-After", "requests", float(got.retry_after_missing), at_most(0.0))
    add(
        "of the accepted, within both SLOs",
        "",
        got.num_within_slo / got.num_ok if got.num_ok else 0.0,
        at_least(0.95),
    )
    add("goodput under overload", "requests/s", goodput)
    add("goodput at 1×", "requests/s", goodput_once)
    add(
        "goodput under overload / at 1×",
        "",
        goodput / goodput_once if goodput_once else 0.0,
        at_least(0.9),
    )
    add("recovery", "s", recovery_seconds(overload, slo, load_ends), at_most(10.0))
    add("client's own lag p99", "s", summarize(overload, slo).lag_p99)
    return found

"""What became of each request of a replay, and what that amounts to."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from launch.figures.result import Figure, Panel, Series

Status = Literal["ok", "rejected", "failed"]


class Outcome(msgspec.Struct, frozen=True):
    """One request. Seconds; -1 where there is none."""

    index: int  # in the trace
    at_seconds: float  # planned, from the start
    lag_seconds: float  # sent so much later
    status: Status
    prompt_tokens: int
    output_tokens: int = 0
    ttft_seconds: float = -1.0
    mean_tbt_seconds: float = -1.0  # of this request: from its first to its last token
    longest_gap_seconds: float = -1.0  # between two arrivals of tokens
    cached_tokens: int = -1  # where the server tells
    prefill: str = ""
    retry_after_seconds: float = -1.0  # of a 429
    error: str = ""


class Slo(msgspec.Struct, frozen=True):
    """Limits that make a request count; 0: none."""

    ttft_seconds: float = 0.0
    tbt_seconds: float = 0.0

    def met_by(self, outcome: Outcome) -> bool:
        if outcome.status != "ok":
            return False
        if self.ttft_seconds and outcome.ttft_seconds > self.ttft_seconds:
            return False
        return not (self.tbt_seconds and outcome.mean_tbt_seconds > self.tbt_seconds)


class Summary(msgspec.Struct, frozen=True):
    """A whole replay. Percentiles are of the requests that were answered."""

    num_arrivals: int
    num_ok: int
    num_rejected: int
    num_failed: int
    num_within_slo: int
    goodput: float  # within the SLO, of all arrivals
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    cached_share: float  # of the prompt tokens answered, where the server tells; else -1
    lag_p99: float
    lag_max: float
    retry_after_missing: int  # 429s without one

    def text(self) -> str:
        """For people."""
        return "\n".join(
            [
                f"arrivals {self.num_arrivals}: {self.num_ok} answered, {self.num_rejected} rejected (429, of which "
                f"{self.retry_after_missing} without Retry-After), {self.num_failed} failed",
                f"goodput {self.goodput:.3f} of all arrivals within the SLO ({self.num_within_slo})",
                f"TTFT mean {self.ttft_mean:.3f} s, p50 {self.ttft_p50:.3f}, p99 {self.ttft_p99:.3f}",
                f"TBT (mean of a request) p50 {self.tbt_p50:.4f} s, p99 {self.tbt_p99:.4f}",
                "prompt tokens reused: "
                + (f"{self.cached_share:.1%}" if self.cached_share >= 0.0 else "not told"),
                f"this client's own lag: p99 {self.lag_p99:.3f} s, longest {self.lag_max:.3f} s",
            ]
        )


def summarize(outcomes: Sequence[Outcome], slo: Slo) -> Summary:
    """Every arrival counts once."""
    answered = [one for one in outcomes if one.status == "ok"]
    rejected = [one for one in outcomes if one.status == "rejected"]
    within = sum(map(slo.met_by, outcomes))
    told = [one for one in answered if one.cached_tokens >= 0]
    ttft = [one.ttft_seconds for one in answered if one.ttft_seconds >= 0.0]
    tbt = [one.mean_tbt_seconds for one in answered if one.mean_tbt_seconds >= 0.0]
    lag = [one.lag_seconds for one in outcomes]
    num_told = sum(one.prompt_tokens for one in told)
    return Summary(
        num_arrivals=len(outcomes),
        num_ok=len(answered),
        num_rejected=len(rejected),
        num_failed=len(outcomes) - len(answered) - len(rejected),
        num_within_slo=within,
        goodput=within / len(outcomes) if outcomes else 0.0,
        ttft_mean=float(np.mean(ttft)) if ttft else 0.0,
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p99=_quantile(ttft, 0.99),
        tbt_p50=_quantile(tbt, 0.5),
        tbt_p99=_quantile(tbt, 0.99),
        cached_share=sum(one.cached_tokens for one in told) / num_told if num_told else -1.0,
        lag_p99=_quantile(lag, 0.99),
        lag_max=max(lag, default=0.0),
        retry_after_missing=sum(one.retry_after_seconds < 0.0 for one in rejected),
    )


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """One line per arrival, in order of the trace. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Outcome.__struct_fields__)
        for one in sorted(outcomes, key=lambda one: one.index):
            writer.writerow(msgspec.structs.astuple(one))


def plotted(outcomes: Sequence[Outcome], title: str) -> Figure:
    """TTFT and TBT over arrival time, and how many had been refused or had failed by then."""
    answered = sorted((one for one in outcomes if one.status == "ok"), key=lambda one: one.at_seconds)
    times = [one.at_seconds for one in answered]
    lost = [
        Series(
            status,
            sorted(one.at_seconds for one in outcomes if one.status == status),
            list(range(1, 1 + sum(one.status == status for one in outcomes))),
            "measured",
        )
        for status in ("rejected", "failed")
    ]
    latencies = {
        "TTFT": [one.ttft_seconds for one in answered],
        "TBT, mean of a request": [one.mean_tbt_seconds for one in answered],
    }
    panels = [
        Panel(name, "arrival, s", "s", [Series("answered", times, seconds, "measured")])
        for name, seconds in latencies.items()
    ]
    panels.append(Panel("not served, so far", "arrival, s", "requests", lost))
    return Figure(f"replay of {title}", "measured", [], panels)


def _quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else 0.0

"""Scheduling policies side by side on a running cluster: the same requests at the same times, one policy after another.

Every policy and arrival seed gets a cluster of its own, so that each begins with empty caches.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launch.figures.result import HOLDS, REPORT, Figure, Gate, Kind, Panel, Row, Series, at_most
from launch.local_cluster import Cluster, ClusterConfig
from launch.replaying.outcome import Outcome, Slo, summarize
from launch.replaying.prompts import Line, Scale, lines
from launch.replaying.targets import ConductorTarget, replay
from mooncake_jax.trace import Trace

NUM_RESAMPLED = 2000


@dataclass(frozen=True)
class Study:
    """What is compared, and on what. `num_seeds`: arrival times are drawn anew for each, over the same span."""

    cluster: ClusterConfig
    scale: Scale
    policies: Sequence[str]
    num_seeds: int
    trace: Trace

    def run(self, progress: Callable[[], object]) -> dict[str, list[list[Outcome]]]:
        """By policy, then seed: outcomes in order of the trace."""
        sent, _ = lines(self.trace, self.scale)
        outcomes: dict[str, list[list[Outcome]]] = {policy: [] for policy in self.policies}
        for seed in range(self.num_seeds):
            arrivals = drawn_arrivals(sent, seed)
            for policy in self.policies:
                outcomes[policy].append(self._serve(policy, seed, arrivals))
                progress()
        return outcomes

    def _serve(self, policy: str, seed: int, sent: list[Line]) -> list[Outcome]:
        config = dataclasses.replace(
            self.cluster,
            run_dir=Path(self.cluster.run_dir) / f"{policy}-{seed}",
            conductor_flags=(*self.cluster.conductor_flags, f"--policy={policy}"),
        )
        with Cluster(config) as cluster:
            target = ConductorTarget(cluster.instances["conductor"])
            return asyncio.run(replay(target, sent, lambda outcome: None))


def drawn_arrivals(sent: Sequence[Line], seed: int) -> list[Line]:
    """The same requests in the same order, at times drawn evenly over the span of `sent`."""
    span = max((line.at_seconds for line in sent), default=0.0)
    times = np.sort(np.random.default_rng(seed).uniform(0.0, span, len(sent))).tolist()
    return [dataclasses.replace(line, at_seconds=at) for line, at in zip(sent, times, strict=True)]


def difference(
    ours: Sequence[Sequence[Outcome]], other: Sequence[Sequence[Outcome]]
) -> tuple[float, float, float]:
    """Mean of ours less the other's TTFT over the requests that both answered, with its 95 % bootstrap interval.

    (nan, nan, nan) when there are none.
    """
    pairs = [
        mine.ttft_seconds - theirs.ttft_seconds
        for run, against in zip(ours, other, strict=True)
        for mine, theirs in zip(run, against, strict=True)
        if mine.status == theirs.status == "ok"
    ]
    if not pairs:
        return math.nan, math.nan, math.nan
    values, rng = np.array(pairs), np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (NUM_RESAMPLED, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def figure(
    title: str, kind: Kind, outcomes: Mapping[str, list[list[Outcome]]], notes: Sequence[str]
) -> Figure:
    """A row per policy and quantity, and the differences of `global` to the others, which must lie below 0."""
    rows: list[Row] = []

    def add(quantity: str, unit: str, value: float, gate: Gate = REPORT) -> None:
        rows.append(Row(quantity, unit, math.nan, value, gate, value, value))

    means = {}
    for policy, runs in outcomes.items():
        flat = [outcome for run in runs for outcome in run]
        got = summarize(flat, Slo())
        means[policy] = got.ttft_mean
        add(f"mean TTFT, {policy}", "s", got.ttft_mean)
        add(f"p50 TTFT, {policy}", "s", got.ttft_p50)
        add(f"p99 TTFT, {policy}", "s", got.ttft_p99)
        add(f"prompt tokens reused, {policy}", "%", 100.0 * got.cached_share)
        recomputed = sum(one.prompt_tokens - one.cached_tokens for one in flat if one.status == "ok")
        add(f"prompt tokens computed, {policy}", "tokens", float(recomputed))
        add(f"rejected (429), {policy}", "requests", float(got.num_rejected))
        add(f"client's own lag p99, {policy}", "s", got.lag_p99)
    for other in ("load", "random"):
        if other in outcomes and "global" in outcomes:
            mean, low, high = difference(outcomes["global"], outcomes[other])
            add(f"global less {other}: mean TTFT [95 % from {low:.3f} to {high:.3f}]", "s", mean)
            add(f"global < {other}, the interval clear of 0", "", float(high < 0.0), HOLDS)
    if "local" in outcomes and "global" in outcomes:
        add("global / local", "", means["global"] / means["local"], at_most(1.05))
    bars = [Series(f"{kind}, mean of all seeds", list(means), list(means.values()), kind)]
    return Figure(title, kind, rows, [Panel("mean TTFT", "policy", "s", bars, bars=True)], notes)

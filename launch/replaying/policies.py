"""Scheduling policies side by side on a running cluster: the same requests at the same times, one policy after another.

Each policy has a Conductor of its own, and all instances beat to all of them. Every run salts its prompts, so that it
finds nothing of the runs before: what those left in the caches is the first to be evicted. The order of the policies
turns with every arrival seed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from launch.figures.result import HOLDS, REPORT, Figure, Gate, Kind, Panel, Row, Series, at_most
from launch.local_cluster import Cluster, ClusterConfig
from launch.replaying.outcome import Outcome, Slo, summarize
from launch.replaying.prompts import Line
from launch.replaying.targets import ConductorTarget, replay

NUM_RESAMPLED = 1000


@dataclass(frozen=True)
class Study:
    """What is compared, and on what: `arrivals` has the requests of each seed."""

    cluster: ClusterConfig
    policies: Sequence[str]
    arrivals: Sequence[list[Line]]

    def run(self, progress: Callable[[], object]) -> dict[str, list[list[Outcome]]]:
        """By policy, then seed: outcomes in order of the requests."""
        outcomes: dict[str, list[list[Outcome]]] = {policy: [] for policy in self.policies}
        config = dataclasses.replace(self.cluster, num_more_conductors=len(self.policies))
        with Cluster(config) as cluster:
            conductors = {
                policy: cluster.start_conductor(
                    *config.conductor_flags,
                    f"--policy={policy}",
                    f"--decision_log={config.run_dir / f'decisions-{policy}.jsonl'}",
                )
                for policy in self.policies
            }
            for seed, sent in enumerate(self.arrivals):
                turn = seed % len(self.policies)
                for policy in (*self.policies[turn:], *self.policies[:turn]):
                    target = ConductorTarget(conductors[policy], salt=f"{policy}-{seed}")
                    outcomes[policy].append(asyncio.run(replay(target, sent, lambda outcome: None)))
                    progress()
        return outcomes


def drawn_arrivals(sent: Sequence[Line], seed: int, span_seconds: float) -> list[Line]:
    """The same requests in the same order, at times drawn evenly over a span."""
    times = np.sort(np.random.default_rng(seed).uniform(0.0, span_seconds, len(sent))).tolist()
    return [dataclasses.replace(line, at_seconds=at) for line, at in zip(sent, times, strict=True)]


def difference(
    ours: Sequence[Sequence[Outcome]], other: Sequence[Sequence[Outcome]]
) -> tuple[float, float, float]:
    """Mean of ours less the other's TTFT over the requests that both answered, with its 95 % bootstrap interval.

    Two levels: runs are drawn, then requests within each, because the requests of a run share its queues.
    (nan, nan, nan) when there are none.
    """
    return interval(
        [
            [
                mine.ttft_seconds - theirs.ttft_seconds
                for mine, theirs in zip(run, against, strict=True)
                if mine.status == theirs.status == "ok"
            ]
            for run, against in zip(ours, other, strict=True)
        ]
    )


def interval(runs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The mean of all values, and its 95 % bootstrap interval over runs and the values of each."""
    filled = [np.array(run) for run in runs if run]
    if not filled:
        return math.nan, math.nan, math.nan
    rng, means = np.random.default_rng(0), np.empty(NUM_RESAMPLED)
    for i in range(NUM_RESAMPLED):
        drawn = [filled[run] for run in rng.integers(0, len(filled), len(filled))]
        means[i] = np.concatenate([run[rng.integers(0, len(run), len(run))] for run in drawn]).mean()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(np.concatenate(filled).mean()), float(low), float(high)


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
        _, low, high = interval([[one.ttft_seconds for one in run if one.status == "ok"] for run in runs])
        add(f"mean TTFT, {policy} [95 % from {low:.3f} to {high:.3f}]", "s", got.ttft_mean)
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

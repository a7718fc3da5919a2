"""Where figures get their runs: workloads from the traces that are here, each run done once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from launch.figures.assumptions import Assumptions, Chosen
from launch.figures.result import Expected, Figure, Panel, Values, rows_of
from mooncake_jax.cost_model import CostModelFile, NodeCosts
from mooncake_jax.simulation import (
    Cluster,
    ClusterConfig,
    CoupledCluster,
    CoupledConfig,
    Outcomes,
    Workload,
)
from mooncake_jax.simulation.config import CoupledMode
from mooncake_jax.trace import Trace, read_trace

NUM_NODES = 16
TTFT_SLO_SECONDS = 30.0
FILES = {
    "conversation": "conversation_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "toolagent": "toolagent_trace.jsonl",
}


@dataclass(frozen=True, eq=False)
class Run:
    """One simulated run: every request's outcome, and the prefill GPU seconds of a request."""

    outcomes: Outcomes
    gpu_seconds: float

    def effective(self, tbt_slo_seconds: float, ttft_slo_seconds: float = TTFT_SLO_SECONDS) -> float:
        """In percent."""
        return 100.0 * self.outcomes.effective(ttft_slo_seconds, tbt_slo_seconds)

    @property
    def mean_tbt_seconds(self) -> float:
        return float(np.mean(self.outcomes.mean_tbt_seconds[self.outcomes.finished]))


@dataclass(eq=False)
class Lab:
    """`traces`: their folder; a trace that is not in it leaves out the figures that need it."""

    traces: Path | None
    file: CostModelFile
    limit: int | None = None  # requests of a trace; None: all
    progress: tqdm | None = None  # moves on with every run
    _traces: dict[str, Trace] = field(default_factory=dict)
    _workloads: dict[str, Workload] = field(default_factory=dict)
    _runs: dict[tuple[str, object], Run] = field(default_factory=dict)

    @property
    def costs(self) -> NodeCosts:
        return self.file.costs

    def path(self, name: str) -> Path | None:
        """Of a trace, if it is here."""
        if self.traces is None:
            return None
        path = self.traces / FILES[name]
        return path if path.is_file() else None

    def present(self, *names: str) -> list[str]:
        """Those of `names` (all if none are given) whose traces are here."""
        return [name for name in names or tuple(FILES) if self.path(name) is not None]

    def trace(self, name: str) -> Trace:
        """Raises InvalidError for a trace with a fault, FileNotFoundError for one that is not here."""
        if name not in self._traces:
            path = self.path(name)
            if path is None:
                raise FileNotFoundError(f"{FILES[name]} is not in {self.traces}")
            self._traces[name] = read_trace(path, self.limit)
        return self._traces[name]

    def workload(self, name: str) -> Workload:
        """As `trace`."""
        if name not in self._workloads:
            self._workloads[name] = Workload.of(self.trace(name))
        return self._workloads[name]

    def cluster_config(self, chosen: Chosen, **changes: Any) -> ClusterConfig:
        """A cluster of `NUM_NODES` nodes by what is assumed, with `changes` that the figure states."""
        if "costs" in changes:
            raise ValueError("a figure does not change the cost model")
        assumed = ClusterConfig(
            num_prefill=chosen.prefill_nodes,
            num_decode=NUM_NODES - chosen.prefill_nodes,
            costs=self.costs,
            discipline=chosen.discipline,
            balancing_threshold=chosen.balancing_threshold,
            decode_slots=chosen.decode_slots,
            seed=chosen.seed,
        )
        return dataclasses.replace(assumed, **changes)

    def cluster(self, name: str, chosen: Chosen, *, one_output: bool = False, **changes: Any) -> Run:
        """Trace `name` on a disaggregated cluster."""
        config = self.cluster_config(chosen, **changes)
        workload = self.workload(name)
        if one_output:
            workload = workload.with_one_output()
        return self._once(name, (config, one_output), lambda: _run(Cluster(config, workload)))

    def coupled(self, name: str, chosen: Chosen, mode: CoupledMode) -> Run:
        """Trace `name` on the baseline."""
        config = CoupledConfig(
            num_nodes=NUM_NODES,
            costs=self.costs,
            mode=mode,
            chunk_tokens=chosen.chunk_tokens,
            dispatch=chosen.dispatch,
            num_slots=chosen.decode_slots,
            seed=chosen.seed,
        )
        workload = self.workload(name)
        return self._once(name, config, lambda: _run(CoupledCluster(config, workload)))

    def _once(self, name: str, key: object, run: Callable[[], Run]) -> Run:
        if (name, key) not in self._runs:
            self._runs[name, key] = run()
            if self.progress is not None:
                self.progress.update()
        return self._runs[name, key]


def simulated(
    lab: Lab,
    assumptions: Assumptions,
    *,
    title: str,
    measure: Callable[[Lab, Chosen], Values],
    expected: Sequence[Expected],
    panels: Sequence[Panel],
    varied: Sequence[str],
    notes: Sequence[str] = (),
) -> Figure:
    """A figure of simulated runs: measured as assumed, and again with each of `varied` at its other values."""
    values = measure(lab, assumptions.chosen)
    variants = [measure(lab, chosen) for chosen in assumptions.variants(varied)]
    ranges = {name: assumptions.ranges[name] for name in varied}
    return Figure(title, "simulated", rows_of(expected, values, variants), panels, notes, ranges)


def _run(cluster: Cluster | CoupledCluster) -> Run:
    outcomes = cluster.run()
    return Run(outcomes, cluster.gpu_seconds / len(outcomes.state))

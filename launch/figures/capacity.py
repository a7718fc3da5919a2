"""Effective request capacity against the TBT SLO: Figures 1, 6 and 7 are this one figure of three traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from launch.figures.assumptions import Assumptions, Chosen
from launch.figures.lab import Lab, Run, simulated
from launch.figures.result import REPORT, Expected, Figure, Gate, Panel, Series, Values
from mooncake_jax.simulation.config import CoupledMode

THRESHOLDS = (0.1, 0.2, 0.3)  # seconds
MODES: tuple[CoupledMode, ...] = ("plain", "prefix_caching", "chunked_prefill")
NAMES = {
    "mooncake": "Mooncake",
    "plain": "vLLM",
    "prefix_caching": "vLLM, prefix caching",
    "chunked_prefill": "vLLM, chunked prefill",
}
_UNKNOWN = (math.nan,) * 3


@dataclass(frozen=True)
class Paper:
    """Percent of all requests within 100, 200 and 300 ms, and how many more than `over` these are."""

    mooncake: Sequence[float] = _UNKNOWN
    plain: Sequence[float] = _UNKNOWN
    prefix_caching: Sequence[float] = _UNKNOWN
    chunked_prefill: Sequence[float] = _UNKNOWN
    gains: Sequence[float] = _UNKNOWN
    median_tbt_seconds: float = math.nan
    over: CoupledMode = "plain"


def capacity_figure(
    lab: Lab,
    assumptions: Assumptions,
    title: str,
    trace: str,
    paper: Paper,
    gates: Mapping[str, Gate | Sequence[Gate]],
    notes: Sequence[str] = (),
) -> Figure:
    """`gates`: three per system and for `gains`, one for `falling` and `median`; what is missing is reported."""
    runs = _runs(lab, trace, assumptions.chosen)
    milliseconds = np.arange(10, 401, 2)
    curves = [
        Series(
            NAMES[system],
            milliseconds.tolist(),
            [run.effective(at / 1000) for at in milliseconds],
            "simulated",
        )
        for system, run in runs.items()
    ]
    curves += [
        Series(NAMES[system], [at * 1000 for at in THRESHOLDS], getattr(paper, system), "paper")
        for system in runs
        if not math.isnan(getattr(paper, system)[0])
    ]
    return simulated(
        lab,
        assumptions,
        title=title,
        measure=partial(_measure, trace=trace, over=paper.over),
        expected=_expected(paper, gates),
        panels=[Panel(trace, "TBT SLO (ms)", "requests within both SLOs (%)", curves)],
        varied=("prefill_nodes", "discipline", "chunk_tokens", "dispatch"),
        notes=notes,
    )


def _runs(lab: Lab, trace: str, chosen: Chosen) -> dict[str, Run]:
    return {
        "mooncake": lab.cluster(trace, chosen),
        **{mode: lab.coupled(trace, chosen, mode) for mode in MODES},
    }


def _measure(lab: Lab, chosen: Chosen, *, trace: str, over: CoupledMode) -> Values:
    runs = _runs(lab, trace, chosen)
    values = {f"{system}@{at}": run.effective(at) for system, run in runs.items() for at in THRESHOLDS}
    gains = [100.0 * (values[f"mooncake@{at}"] / values[f"{over}@{at}"] - 1.0) for at in THRESHOLDS]
    finished = runs["mooncake"].outcomes
    return {
        **values,
        **{f"gains@{at}": gain for at, gain in zip(THRESHOLDS, gains, strict=True)},
        "falling": float(gains[0] > gains[1] > gains[2] > 0.0),
        "median": float(np.median(finished.tbt_seconds[finished.finished])) * 1000,
    }


def _expected(paper: Paper, gates: Mapping[str, Gate | Sequence[Gate]]) -> list[Expected]:
    def three(system: str) -> Sequence[Gate]:
        found = gates.get(system, (REPORT,) * 3)
        return (found,) * 3 if isinstance(found, Gate) else found

    def one(name: str) -> Gate:
        found = gates.get(name, REPORT)
        return found if isinstance(found, Gate) else found[0]

    rows = [
        Expected(f"{NAMES[system]} within {at * 1000:.0f} ms", f"{system}@{at}", value, gate, "%")
        for system in NAMES
        for at, value, gate in zip(THRESHOLDS, getattr(paper, system), three(system), strict=True)
    ]
    rows += [
        Expected(
            f"more requests than {NAMES[paper.over]} at {at * 1000:.0f} ms", f"gains@{at}", gain, gate, "%"
        )
        for at, gain, gate in zip(THRESHOLDS, paper.gains, three("gains"), strict=True)
    ]
    return [
        *rows,
        Expected("gains are positive and fall with the threshold", "falling", math.nan, one("falling")),
        Expected("median TBT of Mooncake", "median", paper.median_tbt_seconds * 1000, one("median"), "ms"),
    ]

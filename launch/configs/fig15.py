"""Figure 15: splits of 16 nodes into prefill and decode, synthetic trace, SLOs of 10 s TTFT and 100 ms TBT.

Claim: capacity is best near a split of one to one; more prefill nodes take TTFT down and TBT up. TBT is taken as the
mean token interval here (the other reading is that of section 5.1). One constant of the cost model, the cost of a
further request in a decode batch, was fitted on this figure's TBT curve, so the TBT rows are no evidence.

    python -m launch.experiment --config=fig15          # about 10 s
"""

from __future__ import annotations

import math

from launch.figures.assumptions import Assumptions, Chosen
from launch.figures.lab import NUM_NODES, Lab, Run, simulated
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Panel, Series, Values, points, within

TITLE = "Figure 15: prefill / decode split, synthetic trace, 16 nodes"
TRACES = ("synthetic",)
SPLITS = (5, 6, 7, 8, 9, 10, 11)  # prefill nodes
TTFT_SLO_SECONDS, TBT_SLO_SECONDS = 10.0, 0.1
PAPER_CAPACITY = {5: 77.7, 6: 97.2, 8: 99.0, 10: 98.4, 11: 86.1}
PAPER_TTFT = {5: 5.75, 6: 1.70, 8: 1.18, 11: 1.12}
PAPER_TBT = {5: 31.5, 8: 35.0, 10: 44.2, 11: 58.2}
NOTES = (
    "The fall at 11P5D is there, and smaller than the paper's: its TBT has a heavier tail than a linear cost of "
    "batch and KV gives.",
)


def _split(prefill: int) -> str:
    return f"{prefill}P{NUM_NODES - prefill}D"


EXPECTED = [
    *(
        Expected(
            f"effective requests, {_split(p)}",
            f"capacity {p}",
            value,
            points(3.0) if 6 <= p <= 10 else REPORT,
            "%",
        )
        for p, value in PAPER_CAPACITY.items()
    ),
    Expected("the best is at 7P9D to 9P7D, up to a point", "peak", math.nan, HOLDS),
    Expected("5P11D and 11P5D are below the plateau", "falls", math.nan, HOLDS),
    *(
        Expected(f"mean TTFT, {_split(p)}", f"ttft {p}", value, within(0.35 if p == 5 else 0.20), "s")
        for p, value in PAPER_TTFT.items()
    ),
    *(
        Expected(f"mean TBT, {_split(p)} (calibration)", f"tbt {p}", value, within(0.12), "ms")
        for p, value in PAPER_TBT.items()
    ),
]


def _runs(lab: Lab, chosen: Chosen) -> dict[int, Run]:
    return {p: lab.cluster("synthetic", chosen, num_prefill=p, num_decode=NUM_NODES - p) for p in SPLITS}


def measure(lab: Lab, chosen: Chosen) -> Values:
    values: Values = {}
    for p, run in _runs(lab, chosen).items():
        values[f"capacity {p}"] = run.effective(TBT_SLO_SECONDS, TTFT_SLO_SECONDS)
        values[f"ttft {p}"] = run.outcomes.mean_ttft_seconds
        values[f"tbt {p}"] = 1000 * run.mean_tbt_seconds
    capacity = {p: values[f"capacity {p}"] for p in SPLITS}
    plateau = max(capacity[p] for p in (7, 8, 9))
    values["peak"] = float(plateau >= max(capacity.values()) - 1.0)
    values["falls"] = float(max(capacity[5], capacity[11]) < min(capacity[p] for p in (7, 8, 9)))
    return values


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    values = measure(lab, assumptions.chosen)
    panels = [
        Panel(
            title,
            "prefill nodes",
            unit,
            [
                Series(title, SPLITS, [values[f"{key} {p}"] for p in SPLITS], "simulated"),
                Series(title, list(paper), list(paper.values()), "paper"),
            ],
        )
        for title, unit, key, paper in (
            ("effective requests", "%", "capacity", PAPER_CAPACITY),
            ("mean TTFT", "s", "ttft", PAPER_TTFT),
            ("mean TBT", "ms", "tbt", PAPER_TBT),
        )
    ]
    return simulated(
        lab,
        assumptions,
        title=TITLE,
        measure=measure,
        expected=EXPECTED,
        panels=panels,
        varied=("discipline", "balancing_threshold"),
        notes=NOTES,
    )

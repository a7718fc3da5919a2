"""Figure 6: effective request capacity against the TBT SLO, tool & agent trace, 16 nodes, TTFT SLO 30 s.

Claim: +64 %, +42 %, +22 % requests over vLLM with prefix caching at 100, 200, 300 ms. The trace is not part of this
repository: `python -m launch.fetch_traces` says where it comes from. Without it the figure is left out.

    python -m launch.experiment --config=fig06 --traces=FOLDER
"""

from __future__ import annotations

from launch.figures.assumptions import Assumptions
from launch.figures.capacity import Paper, capacity_figure
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Figure

TITLE = "Figure 6: effective request capacity, tool & agent trace, 16 nodes"
TRACES = ("toolagent",)

PAPER = Paper(gains=(64.0, 42.0, 22.0), over="prefix_caching")
GATES = {"gains": (REPORT,) * 3, "falling": HOLDS}


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    return capacity_figure(lab, assumptions, TITLE, "toolagent", PAPER, GATES)

"""Figure 7: effective request capacity against the TBT SLO, synthetic trace, 16 nodes, TTFT SLO 30 s.

Claim: +62 %, +40 %, +28 % requests over vLLM at 100, 200, 300 ms.

    python -m launch.experiment --config=fig07          # about 5 s
"""

from __future__ import annotations

from launch.figures.assumptions import Assumptions
from launch.figures.capacity import Paper, capacity_figure
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Figure, factor, points, within

TITLE = "Figure 7: effective request capacity, synthetic trace, 16 nodes"
TRACES = ("synthetic",)

PAPER = Paper(
    mooncake=(99.5, 100.0, 100.0),
    plain=(61.0, 71.0, 78.0),
    prefix_caching=(61.0, 71.0, 77.5),
    chunked_prefill=(46.5, 57.5, 69.5),
    gains=(62.0, 40.0, 28.0),
    median_tbt_seconds=0.0395,
)
GATES = {
    "mooncake": (points(2.0),) * 3,
    "plain": (within(0.20),) * 3,
    "prefix_caching": (within(0.20),) * 3,
    "chunked_prefill": (within(0.30),) * 3,
    "gains": (factor(1.7),) * 3,
    "falling": HOLDS,
    "median": REPORT,
}


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    return capacity_figure(lab, assumptions, TITLE, "synthetic", PAPER, GATES)

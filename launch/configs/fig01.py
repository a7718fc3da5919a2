"""Figure 1: effective request capacity against the TBT SLO, conversation trace, 16 nodes, TTFT SLO 30 s.

Claim: the disaggregated cluster serves nearly all requests under every threshold; vLLM, with or without prefix caching
or chunked prefill, does so only under loose ones: +498 %, +157 %, +59 % at 100, 200, 300 ms.

    python -m launch.experiment --config=fig01          # about 15 s
"""

from __future__ import annotations

from launch.figures.assumptions import Assumptions
from launch.figures.capacity import Paper, capacity_figure
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Figure, at_least, points, within

TITLE = "Figure 1: effective request capacity, conversation trace, 16 nodes"
TRACES = ("conversation",)

PAPER = Paper(
    mooncake=(96.5, 100.0, 100.0),
    plain=(16.0, 39.0, 62.0),
    prefix_caching=(15.0, 34.0, 57.0),
    chunked_prefill=(9.0, 28.0, 55.0),
    gains=(498.0, 157.0, 59.0),
    median_tbt_seconds=0.075,
)
GATES = {
    "mooncake": (points(5.0), REPORT, REPORT),
    "gains": (at_least(50.0), REPORT, REPORT),
    "falling": HOLDS,
    "median": within(0.10),
}
NOTES = (
    "The baselines of this figure are not reproduced: our vLLM keeps more requests within 100 ms than the paper's "
    "(16 %), since the batch costs that vLLM 0.5.1 had are not in the paper; the gain is a ratio to that small share, "
    "so it misses by a factor. What holds: the sign, the order of the gains, and the disaggregated cluster itself.",
)


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    return capacity_figure(lab, assumptions, TITLE, "conversation", PAPER, GATES, NOTES)

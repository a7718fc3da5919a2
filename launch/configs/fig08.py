"""Figure 8: prefill GPU time of a request, each trace, 16 nodes.

Claim: reuse from the global cache takes 36 % (conversation), 53 % (tool & agent) and 64 % (synthetic) off what vLLM
computes; prefix caching in device memory comes near where hits are concentrated, not where they are dispersed.

    python -m launch.experiment --config=fig08          # about 20 s; runs are those of Figures 1 and 7
"""

from __future__ import annotations

import math

from launch.figures.assumptions import Assumptions, Chosen
from launch.figures.capacity import MODES, NAMES
from launch.figures.lab import Lab, simulated
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Panel, Series, Values, within

TITLE = "Figure 8: prefill GPU seconds of a request, 16 nodes"
TRACES = ()  # those that are here
SYSTEMS = ("mooncake", *MODES)
PAPER = {  # seconds of Mooncake, then the others as multiples of it
    "conversation": (1.06, 1.56, 1.43, 1.90),
    "toolagent": (0.52, 2.12, 1.40, 2.68),
    "synthetic": (0.73, 2.76, 2.59, 3.33),
}
GATES = {
    "mooncake": within(0.10),
    "plain": within(0.10),
    "prefix_caching": within(0.10),
    "chunked_prefill": within(0.20),
}


def _paper_seconds(trace: str) -> list[float]:
    own, *multiples = PAPER[trace]
    return [own, *(own * multiple for multiple in multiples)]


EXPECTED = [
    *(
        Expected(
            f"{trace}: {NAMES[system]}",
            f"{trace} {system}",
            seconds,
            REPORT if trace == "toolagent" else GATES[system],
            "s",
        )
        for trace in PAPER
        for system, seconds in zip(SYSTEMS, _paper_seconds(trace), strict=True)
    ),
    *(
        Expected(f"{trace}: {NAMES[mode]} / Mooncake", f"{trace} {mode} ratio", multiple, REPORT)
        for trace in PAPER
        for mode, multiple in zip(MODES, PAPER[trace][1:], strict=True)
    ),
    *(
        Expected(f"{trace}: Mooncake < prefix caching < vLLM < chunked", f"{trace} order", math.nan, HOLDS)
        for trace in PAPER
    ),
]


def measure(lab: Lab, chosen: Chosen) -> Values:
    values: Values = {}
    for trace in lab.present(*PAPER):
        own = lab.cluster(trace, chosen).gpu_seconds
        plain, cached, chunked = (lab.coupled(trace, chosen, mode).gpu_seconds for mode in MODES)
        seconds = dict(zip(SYSTEMS, (own, plain, cached, chunked), strict=True))
        values |= {f"{trace} {system}": value for system, value in seconds.items()}
        values |= {f"{trace} {mode} ratio": seconds[mode] / own for mode in MODES}
        values[f"{trace} order"] = float(own < cached < plain < chunked)
    return values


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    values = measure(lab, assumptions.chosen)
    labels = [NAMES[system] for system in SYSTEMS]
    panels = [
        Panel(
            trace,
            "system",
            "GPU seconds a request",
            [
                Series("ours", labels, [values[f"{trace} {system}"] for system in SYSTEMS], "simulated"),
                Series("Figure 8", labels, _paper_seconds(trace), "paper"),
            ],
            bars=True,
        )
        for trace in lab.present(*PAPER)
    ]
    return simulated(
        lab,
        assumptions,
        title=TITLE,
        measure=measure,
        expected=EXPECTED,
        panels=panels,
        varied=("prefill_nodes", "discipline", "chunk_tokens"),
    )

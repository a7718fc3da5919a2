"""Figure 10: local against global cache, 10 prefill nodes of 3 million tokens each, answers of one token.

Claim: with a global cache the hit rate is up to 2.36 times, the prefill GPU time down to 0.52 times that of caches of
which each prefill node sees only its own.

    python -m launch.experiment --config=fig10          # about 10 s
"""

from __future__ import annotations

import math

from launch.figures.assumptions import Assumptions, Chosen
from launch.figures.lab import Lab, simulated
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Panel, Series, Values, within

TITLE = "Figure 10: local against global cache, 10 prefill nodes"
TRACES = ()
POLICIES = ("local", "global")
PAPER = {  # hit rate local, global; GPU seconds local, global
    "conversation": (0.17, 0.377, 1.38, 1.05),
    "synthetic": (0.264, 0.622, 1.50, 0.78),
}
RATIOS = {"conversation": (2.22, 0.76), "synthetic": (2.36, 0.52), "toolagent": (1.38, 0.74)}
NOTES = (
    "The local bars are not reproduced. A scheduler that prefers the instance with the longest prefix, as section 4.1 "
    "describes the local policy, keeps a conversation where its blocks are, so local caches already reach nearly the "
    "global hit rate. The paper's 2.2 to 2.4 times cannot come from that policy; dispatch that ignores the cache (the "
    "policy random here) goes beyond it.",
)

EXPECTED = [
    *(
        expected
        for trace, (local_hit, global_hit, local_gpu, global_gpu) in PAPER.items()
        for expected in (
            Expected(f"{trace}: hit rate, global", f"{trace} hit global", global_hit, within(0.06)),
            Expected(f"{trace}: hit rate, local", f"{trace} hit local", local_hit, REPORT),
            Expected(f"{trace}: GPU time, global", f"{trace} gpu global", global_gpu, within(0.08), "s"),
            Expected(f"{trace}: GPU time, local", f"{trace} gpu local", local_gpu, REPORT, "s"),
        )
    ),
    *(
        expected
        for trace, (hits, gpu) in RATIOS.items()
        for expected in (
            Expected(f"{trace}: hit rate, global / local", f"{trace} hits", hits, REPORT),
            Expected(f"{trace}: GPU time, global / local", f"{trace} gpu", gpu, REPORT),
            Expected(f"{trace}: hit rate, random dispatch", f"{trace} hit random", math.nan, REPORT),
            Expected(f"{trace}: the global cache hits more often", f"{trace} ahead", math.nan, HOLDS),
        )
    ),
]


def measure(lab: Lab, chosen: Chosen) -> Values:
    values: Values = {}
    for trace in lab.present(*RATIOS):
        for policy in (*POLICIES, "random"):
            run = lab.cluster(
                trace,
                chosen,
                one_output=True,
                policy=policy,
                num_prefill=10,
                num_decode=6,
                dram_tokens=3_000_000,
            )
            values[f"{trace} hit {policy}"] = run.outcomes.hit_rate
            values[f"{trace} gpu {policy}"] = run.gpu_seconds
        values[f"{trace} hits"] = values[f"{trace} hit global"] / values[f"{trace} hit local"]
        values[f"{trace} gpu"] = values[f"{trace} gpu global"] / values[f"{trace} gpu local"]
        values[f"{trace} ahead"] = float(values[f"{trace} hits"] >= 1.0)
    return values


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    values = measure(lab, assumptions.chosen)
    traces = lab.present(*RATIOS)
    known = [trace for trace in traces if trace in PAPER]
    panels = [
        Panel(
            label,
            "trace",
            unit,
            [
                *(
                    Series(
                        policy, traces, [values[f"{trace} {key} {policy}"] for trace in traces], "simulated"
                    )
                    for policy in POLICIES
                ),
                *(
                    Series(policy, known, [PAPER[trace][first + place] for trace in known], "paper")
                    for place, policy in enumerate(POLICIES)
                ),
            ],
            bars=True,
        )
        for label, unit, key, first in (
            ("hit rate", "share of tokens", "hit", 0),
            ("GPU time", "s a request", "gpu", 2),
        )
    ]
    return simulated(
        lab,
        assumptions,
        title=TITLE,
        measure=measure,
        expected=EXPECTED,
        panels=panels,
        varied=("balancing_threshold",),
        notes=NOTES,
    )

"""Equation 2: the bandwidth from which reusing a prefix is faster than computing it.

Claim: B / G > 2 d s / (gqa (a p d + b d²)), which is 6 GB/s on 8×A800 and 19 GB/s on 8×H800 for 8,192
tokens of LLaMA3-70B, so that one NIC of 100 Gbps is enough.

    python -m launch.experiment --config=equation2      # nothing runs
"""

from __future__ import annotations

from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Expected, Figure, Panel, Series, rows_of, within

TITLE = "Equation 2: bandwidth from which reuse pays, LLaMA3-70B"
TRACES = ()
MODEL_DIM, A, B, GQA, ELEMENT_NBYTES = 8192, 4, 22, 8, 2  # Table 1
FLOPS = {"8×A800": 8 * 312e12, "8×H800": 8 * 989e12}
PAPER = {"8×A800": 6.0, "8×H800": 19.0}  # GB/s
PREFIX = 8192


def bandwidth(flops: float, prefix: int) -> float:
    """Bytes per second from which loading `prefix` tokens is faster than computing them at `flops` per second."""
    d = MODEL_DIM
    return flops * 2 * d * ELEMENT_NBYTES / (GQA * (A * prefix * d + B * d**2))


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    values = {node: bandwidth(flops, PREFIX) / 1e9 for node, flops in FLOPS.items()}
    expected = [
        Expected(f"{node}, {PREFIX} tokens", node, value, within(0.05), "GB/s")
        for node, value in PAPER.items()
    ]
    prefixes = [2**exponent for exponent in range(9, 18)]
    series = [
        Series(node, prefixes, [bandwidth(flops, prefix) / 1e9 for prefix in prefixes], "computed")
        for node, flops in FLOPS.items()
    ]
    series += [Series(node, [PREFIX], [PAPER[node]], "paper") for node in FLOPS]
    panel = Panel("reuse pays above", "prefix (tokens)", "GB/s", series, log_x=True)
    return Figure(TITLE, "computed", rows_of(expected, values), [panel])

"""CPP, tensor and sequence parallelism over X nodes that compute one prompt together: not a figure of the paper.

Claim (section 5.1): CPP needs the network only at the boundaries of its stages and costs short prompts nothing. Bytes
and collectives are counted in steps that XLA compiles at the width of LLaMA3-70B, bubbles by ticks; TTFT is modelled
from the node's cost model. `python -m launch.compare_parallelism` prints every number.

    python -m launch.experiment --config=cpp_vs_tp_vs_sp          # 1 min
"""

from __future__ import annotations

import math

from launch import rivals
from launch.devices import compute_devices
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Gate, Panel, Series, Values, rows_of
from models.config import PRESETS

TITLE = "CPP, TP and SP over X nodes, LLaMA3-70B"
TRACES = ()
NODES = (1, 2, 4, 8)
PROMPTS = (8, 16, 32, 64, 128)  # k tokens
CHUNK = 2048
NODE_FLOPS_PER_SECOND = 8 * 312e12  # of 8 A800, for MFU, which no row of this figure shows
MIX = (128 * 1024, *[2 * 1024] * 8) * 4  # a queue of long and short prompts
NOTES = (
    "Not in the paper. An idle network: there, SP is as fast as CPP and sends 15 times as much.",
    "TP and SP wait for what crosses; CPP passes it on while the next chunk computes.",
)


def _row(quantity: str, key: str, gate: Gate, unit: str = "") -> Expected:
    return Expected(quantity, key, math.nan, gate, unit)


EXPECTED = [
    _row("bubbles counted by ticks are (X-1)/(C+X-1)", "bubbles", HOLDS),
    _row("CPP sends least, then SP, then TP", "least", HOLDS),
    _row("bubbles of a queue of long and short prompts, X = 4", "queue", REPORT, "%"),
    _row("the same, drained after each prompt", "drained", REPORT, "%"),
    *(_row(f"TTFT of 128 k, X = 4, {kind} (modelled)", f"ttft {kind}", REPORT, "s") for kind in rivals.KINDS),
]


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    cfg, devices = PRESETS["llama3-70b"], compute_devices(max(NODES))
    crossings = [rivals.crossing(cfg, kind, n, devices) for n in NODES for kind in rivals.KINDS]
    outcomes = [
        rivals.outcome(cfg, lab.costs, one, 1024 * prompt, CHUNK, NODE_FLOPS_PER_SECOND)
        for one in crossings
        for prompt in PROMPTS
    ]
    sent = {(o.kind, o.num_nodes, o.prompt_tokens): o.sent_gigabytes for o in outcomes if o.num_nodes > 1}
    values: Values = {
        "bubbles": float(
            all(
                math.isclose(
                    o.bubble_fraction, (o.num_nodes - 1) / (o.prompt_tokens // CHUNK + o.num_nodes - 1)
                )
                for o in outcomes
                if o.kind == "CPP"
            )
        ),
        "least": float(
            all(
                sent["CPP", n, t] < sent["SP", n, t] < sent["TP", n, t]
                for kind, n, t in sent
                if kind == "CPP"
            )
        ),
        "queue": 100 * rivals.queue_bubbles(MIX, CHUNK, 4, drained=False),
        "drained": 100 * rivals.queue_bubbles(MIX, CHUNK, 4, drained=True),
    }
    for one in outcomes:
        if one.num_nodes == 4 and one.prompt_tokens == 128 * 1024:
            values[f"ttft {one.kind}"] = one.ttft_seconds
    panels = [
        Panel(
            f"TTFT (modelled), X = {n}",
            "prompt, k tokens",
            "s",
            [
                Series(
                    kind,
                    list(PROMPTS),
                    [o.ttft_seconds for o in outcomes if (o.kind, o.num_nodes) == (kind, n)],
                    "computed",
                )
                for kind in rivals.KINDS
            ],
            log_x=True,
        )
        for n in NODES[1:]
    ]
    return Figure(TITLE, "computed", rows_of(EXPECTED, values), panels, NOTES)

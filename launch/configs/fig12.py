"""Figure 12: how long 40 GB of KV take between two nodes, 64 transfers at a time.

Claim: the transfer engine moves 87 GB/s over 4 NICs of 200 Gbps and 190 GB/s over 8 of 400 Gbps, 2.4 and 4.6 times what TCP
does. Modelled: the simulator's network with the rates of our cost models, which quote this figure, and with the NICs'
line rates. What an engine moves on real sockets is in `real_fig12`.

    python -m launch.experiment --config=fig12          # 1 s
"""

from __future__ import annotations

from launch.figures.assumptions import Assumptions, Chosen
from launch.figures.lab import Lab, simulated
from launch.figures.result import REPORT, Expected, Figure, Panel, Series, Values, at_most, within
from mooncake_jax.cost_model import CostModelFile
from mooncake_jax.simulation.network import Network

TITLE = "Figure 12: transfer of 40 GB between two nodes"
TRACES = ()
NBYTES, NUM_TRANSFERS = 40e9, 64
NICS = {  # node: cost model, NICs, Gbps of one, GB/s in the paper
    "4 × 200 Gbps": ("a800_llama3_70b", 4, 200, 87.0),
    "8 × 400 Gbps": ("h800_llama3_70b", 8, 400, 190.0),
}
NOTES = (
    "The rates of the cost models are this figure's, so the first rows only check that the simulated network adds nothing "
    "to them but the set-up time of a transfer. At line rate the same network would move 100 and 400 GB/s: the paper's "
    "engine reaches 87 % and 48 % of that.",
)

EXPECTED = [
    *(
        Expected(f"{node}: rate (calibration)", f"rate {node}", rate, within(0.05), "GB/s")
        for node, (_, _, _, rate) in NICS.items()
    ),
    *(
        Expected(
            f"{node}: time of 40 GB (calibration)", f"time {node}", NBYTES / 1e9 / rate, within(0.05), "s"
        )
        for node, (_, _, _, rate) in NICS.items()
    ),
    *(
        Expected(f"{node}: rate at line rate", f"line {node}", rate, REPORT, "GB/s")
        for node, (_, _, _, rate) in NICS.items()
    ),
    *(
        Expected(
            f"{node}: the paper's share of line rate", f"share {node}", float("nan"), at_most(100.0), "%"
        )
        for node in NICS
    ),
]


def seconds(nbytes_per_second: float, base_seconds: float) -> float:
    """Until the last of `NUM_TRANSFERS` equal transfers, all asked for at once, has arrived."""
    network = Network([nbytes_per_second] * 2, base_seconds)
    return max(network.send(0, 1, NBYTES / NUM_TRANSFERS, 0.0) for _ in range(NUM_TRANSFERS))


def measure(lab: Lab, chosen: Chosen) -> Values:
    values: Values = {}
    for node, (model, num, gbps, rate) in NICS.items():
        costs, line = CostModelFile.load(model).costs, num * gbps * 1e9 / 8
        took = seconds(costs.nic_nbytes_per_second, costs.transfer_base_seconds)
        values[f"time {node}"], values[f"rate {node}"] = took, NBYTES / took / 1e9
        values[f"line {node}"] = NBYTES / seconds(line, costs.transfer_base_seconds) / 1e9
        values[f"share {node}"] = 100.0 * rate * 1e9 / line
    return values


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    values = measure(lab, assumptions.chosen)
    panel = Panel(
        "40 GB, 64 transfers at a time",
        "NICs",
        "GB/s",
        [
            Series("cost model", list(NICS), [values[f"rate {node}"] for node in NICS], "simulated"),
            Series("line rate", list(NICS), [values[f"line {node}"] for node in NICS], "simulated"),
            Series("Mooncake", list(NICS), [rate for _, _, _, rate in NICS.values()], "paper"),
        ],
        bars=True,
    )
    return simulated(
        lab,
        assumptions,
        title=TITLE,
        measure=measure,
        expected=EXPECTED,
        panels=[panel],
        varied=(),
        notes=NOTES,
    )

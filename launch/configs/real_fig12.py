"""Figure 12 on this machine: one-sided writes between two processes over loopback TCP, 64 at a time.

Claim: the engine moves KV several times as fast as Gloo, and as fast as TCP lets it. In the paper it is 2.4 and 7.5 times
what TCP and Gloo do over 4 × 200 Gbps, 4.6 and 16.2 times over 8 × 400 Gbps: RDMA, many NICs. There are none here, only
the loopback device of a small machine, so the ratios say what each costs in CPU time, not what NICs would allow.

    python -m launch.experiment --config=real_fig12          # about 2 minutes; the upstream engine: MOONCAKE_PEERS=folder
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvstore.transfer import WRITE, TransferEngine, TransferRequest
from launch.benchmarks.peers import GlooPeer, MooncakeTransferPeer
from launch.benchmarks.raw_sockets import RawSockets
from launch.benchmarks.transfer import NBYTES, remote_memory
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Panel, Series, Values, rows_of

TITLE = "Figure 12 measured on a 2-core CPU, loopback TCP"
TRACES = ()
PIECES = {"128 KB": 1 << 17, "1 MB": 1 << 20, "4 MB": 1 << 22}
CONCURRENCY = 64
NUM_ROUNDS = 5
PEERS = "MOONCAKE_PEERS"  # the folder that launch.bench calls --peers
ENGINES = ("ours", "TCP", "Gloo", "upstream")
NAMES = {
    "ours": "our engine",
    "TCP": "one TCP connection",
    "Gloo": "Gloo, through JAX's CPU collectives",
    "upstream": "upstream engine over TCP",
}
NOTES = (
    f"Medians of {NUM_ROUNDS} rounds; in each the engines take turns. {CONCURRENCY} pieces are asked for at a time and "
    "awaited, then the next. The TCP connection is a blocking loop of send and receive without pieces, one way, with a "
    "thread on each side: what is possible there at most. Gloo sends its pieces inside one compiled program.",
)

EXPECTED = [
    *(
        Expected(f"{NAMES[name]}, {size}", f"{name} {size}", math.nan, REPORT, "GB/s")
        for size in PIECES
        for name in ENGINES
    ),
    *(
        Expected(f"our engine over {NAMES[name]}, {size}", f"over {name} {size}", paper, REPORT)
        for size in PIECES
        for name, paper in (("TCP", 2.4), ("Gloo", 7.5), ("upstream", math.nan))
    ),
    Expected("our engine is faster than Gloo at every size", "faster", math.nan, HOLDS),
]


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    values = measured()
    names = [name for name in ENGINES if f"{name} {next(iter(PIECES))}" in values]
    bars = [
        Series(NAMES[name], list(PIECES), [values[f"{name} {size}"] for size in PIECES], "measured")
        for name in names
    ]
    panel = Panel(f"{CONCURRENCY} pieces at a time", "piece", "GB/s", bars, bars=True)
    return Figure(TITLE, "measured", rows_of(EXPECTED, values), [panel], NOTES)


def measured() -> Values:
    """GB/s by engine and size, and ratios."""
    values: Values = {}
    with ExitStack() as stack:
        speeds = _speeds(stack)
        for size, piece in PIECES.items():
            rounds = [{name: speed(piece) for name, speed in speeds.items()} for _ in range(NUM_ROUNDS)]
            for name in speeds:
                values[f"{name} {size}"] = statistics.median(one[name] for one in rounds)
                if name != "ours":
                    values[f"over {name} {size}"] = statistics.median(
                        one["ours"] / one[name] for one in rounds
                    )
    values["faster"] = float(all(values[f"over Gloo {size}"] > 1.0 for size in PIECES))
    return values


def _speeds(stack: ExitStack) -> dict[str, Callable[[int], float]]:
    engine = TransferEngine(host_id="fig12-here")
    stack.callback(engine.close)
    local = np.ones(NBYTES, np.uint8)
    segment = stack.enter_context(remote_memory("fig12-there"))
    tcp = stack.enter_context(RawSockets(NBYTES, 1))
    gloo = stack.enter_context(GlooPeer())

    def ours(piece: int) -> float:
        return _rate(
            piece,
            lambda offsets: engine.transfer(
                [TransferRequest(WRITE, local.data[at : at + piece], segment, at) for at in offsets],
                timeout_seconds=60,
            ),
        )

    speeds: dict[str, Callable[[int], float]] = {
        "ours": ours,
        "TCP": lambda piece: tcp.gigabytes_per_second("write"),
        "Gloo": lambda piece: gloo.gigabytes_per_second(piece, CONCURRENCY, _num_batches(piece)),
    }
    folder = os.environ.get(PEERS)
    if folder and MooncakeTransferPeer.installed(Path(folder)):
        upstream = stack.enter_context(MooncakeTransferPeer(Path(folder)))
        speeds["upstream"] = lambda piece: upstream.gigabytes_per_second(
            "write", piece, CONCURRENCY * piece, times=_num_batches(piece)
        )
    return speeds


def _num_batches(piece: int) -> int:
    return NBYTES // (CONCURRENCY * piece)


def _rate(piece: int, write: Callable[[range], object]) -> float:
    start = time.perf_counter()
    for first in range(0, NBYTES, CONCURRENCY * piece):
        write(range(first, first + CONCURRENCY * piece, piece))
    return NBYTES / (time.perf_counter() - start) / 1e9

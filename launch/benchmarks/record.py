"""What a benchmark row says, how a ratio is measured beside a peer, and how a suite is written down."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
from tqdm import tqdm

Better = Literal["higher", "lower"]


class Row(msgspec.Struct, frozen=True):
    """One figure. `ours` and `peer` are medians over `rounds`; `ratio` is the median of the per-round ratios.

    `ratio` is ours/peer when higher is better and peer/ours when lower is, so that above 1 always means ahead.
    `spread` is (max - min) / median of our values (0: one round).
    """

    name: str
    unit: str
    better: Better
    ours: float
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    ceiling: float | None = None
    rounds: int = 1
    spread: float | None = None


class Machine(msgspec.Struct, frozen=True):
    """Where the figures were measured."""

    cpu: str
    num_cores: int
    python: str
    jax: str

    @classmethod
    def here(cls) -> Machine:
        cpu = platform.processor() or "unknown"
        info = Path("/proc/cpuinfo")
        if info.exists():
            names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
            cpu = names[0] if names else cpu
        return cls(cpu, len(os.sched_getaffinity(0)), platform.python_version(), version("jax"))


class Suite(msgspec.Struct, frozen=True):
    """A suite's rows and the machine they hold for."""

    suite: str
    machine: Machine
    rows: list[Row]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = [
            f"{self.suite} on {self.machine.cpu}, {self.machine.num_cores} cores, jax {self.machine.jax}",
            "",
            "| row | unit | ours | peer | ratio (>1: ahead) | ceiling | rounds | spread |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
        ]
        for row in self.rows:
            peer = f"{_figure(row.peer)} ({row.peer_name})" if row.peer is not None else "–"
            lines.append(
                f"| {row.name} | {row.unit} | {_figure(row.ours)} | {peer} | {_figure(row.ratio)} | "
                f"{_figure(row.ceiling)} | {row.rounds} | {'–' if row.spread is None else f'{row.spread:.0%}'} |"
            )
        return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def measure(
    name: str,
    unit: str,
    better: Better,
    ours: Callable[[], float],
    peer: Callable[[], float] | None = None,
    peer_name: str | None = None,
    *,
    rounds: int,
    ceiling: float | None = None,
) -> Row:
    """Alternate ours and the peer for `rounds` rounds after one unmeasured round of each (which warms both)."""
    mine: list[float] = []
    theirs: list[float] = []
    for index in tqdm(range(rounds + 1), desc=name, leave=False, file=sys.stderr, disable=None):
        value = ours()
        other = peer() if peer else None
        if index > 0 or rounds == 0:
            mine.append(value)
            if other is not None:
                theirs.append(other)
    ratios = [a / b if better == "higher" else b / a for a, b in zip(mine, theirs, strict=False)]
    middle = statistics.median(mine)
    return Row(
        name,
        unit,
        better,
        ours=middle,
        peer=statistics.median(theirs) if theirs else None,
        peer_name=peer_name if theirs else None,
        ratio=statistics.median(ratios) if ratios else None,
        ceiling=ceiling,
        rounds=rounds,
        spread=(max(mine) - min(mine)) / middle if len(mine) > 1 else None,
    )

"""What a benchmark row says, how a ratio is measured beside a peer, and how a suite is written down."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
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
            names = [
                line.split(":", 1)[1].strip()
                for line in info.read_text().splitlines()
                if line.startswith("model name")
            ]
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


class Series:
    """Values of one row, a round at a time."""

    def __init__(self, name: str, unit: str, better: Better):
        self.name, self._unit = name, unit
        self._better: Better = better
        self._ours: list[float] = []
        self._peer: list[float] = []
        self._ceilings: list[float] = []

    def add(self, ours: float, peer: float | None, ceiling: float | None = None) -> None:
        """One round; the peer and the ceiling are measured in every round or in none."""
        self._ours.append(ours)
        if peer is not None:
            self._peer.append(peer)
        if ceiling is not None:
            self._ceilings.append(ceiling)

    def row(self, peer_name: str | None = None, ceiling: float | None = None) -> Row:
        """The medians, and the median of the rounds' ratios."""
        ratios = [
            a / b if self._better == "higher" else b / a for a, b in zip(self._ours, self._peer, strict=False)
        ]
        middle = statistics.median(self._ours)
        return Row(
            self.name,
            self._unit,
            self._better,
            ours=middle,
            peer=statistics.median(self._peer) if self._peer else None,
            peer_name=peer_name if self._peer else None,
            ratio=statistics.median(ratios) if ratios else None,
            ceiling=statistics.median(self._ceilings) if self._ceilings else ceiling,
            rounds=len(self._ours),
            spread=(max(self._ours) - min(self._ours)) / middle if len(self._ours) > 1 else None,
        )


def measure(
    name: str,
    unit: str,
    better: Better,
    ours: Callable[[], float],
    peer: Callable[[], float] | None = None,
    peer_name: str | None = None,
    *,
    rounds: int,
    turn_seconds: float = 0.0,
    ceiling: Callable[[], float] | None = None,
) -> Row:
    """Alternate ours, the peer and the ceiling for `rounds` rounds, after an unmeasured one that warms them.

    A run shorter than `turn_seconds` is repeated for so long, and the last one counts: the first finds the
    caches full of what the other side needed.
    """
    series = Series(name, unit, better)
    for index in tqdm(range(rounds + 1), desc=name, leave=False, file=sys.stderr, disable=None):
        value, other = _turn(ours, turn_seconds), _turn(peer, turn_seconds) if peer else None
        most = ceiling() if ceiling else None
        if index > 0:
            series.add(value, other, most)
    row = series.row(peer_name)
    tell(row)
    return row


def tell(row: Row) -> None:
    """One line of what was measured, past the progress bar."""
    compared = "" if row.ratio is None else f", {_figure(row.ratio)} of {row.peer_name}"
    tqdm.write(f"{row.name}: {_figure(row.ours)} {row.unit}{compared}", file=sys.stderr)


def _turn(run: Callable[[], float], seconds: float) -> float:
    end = time.perf_counter() + seconds
    value = run()
    while time.perf_counter() < end:
        value = run()
    return value

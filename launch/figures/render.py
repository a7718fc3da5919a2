"""Figures as Markdown tables, CSV and PNG files."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.figures.result import Figure, Panel, Row
from launch.process import UsageError

_COLOURS = ("#1f5fa8", "#e07b1a", "#2f8f4e", "#a03c78", "#6b6b6b", "#b8a21a")


def table(figure: Figure) -> str:
    """Its rows as Markdown."""
    lines = [
        "| quantity | paper | ours | error | tolerance | verdict | range over assumptions |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    lines += [
        f"| {row.quantity} | {_value(row.paper, row)} | {_value(row.ours, row)} | {_error(row)} | "
        f"{row.gate.text} | {row.verdict} | {_range(row)} |"
        for row in figure.rows
    ]
    return "\n".join(lines)


def count(figures: Sequence[Figure]) -> tuple[int, int, int]:
    """Rows that are inside, outside, and only reported."""
    verdicts = [row.verdict for figure in figures for row in figure.rows]
    return verdicts.count("inside"), verdicts.count("outside"), verdicts.count("report")


def write_csv(path: Path, figure: Figure) -> None:
    """The curves, one point a line. Raises OSError."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["panel", "series", "source", figure.panels[0].x_label if figure.panels else "x", "y"]
        )
        for panel in figure.panels:
            for series in panel.series:
                for x, y in zip(series.x, series.y, strict=True):
                    writer.writerow([panel.title, series.name, series.source, x, f"{y:.6g}"])


def write_png(path: Path, figure: Figure) -> None:
    """The panels side by side: ours as lines or full bars, the paper's values as crosses or hollow bars.

    Raises UsageError when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Canvas  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError("PNG files need matplotlib: pip install 'mooncake-jax[figures]'") from error
    canvas = Canvas(figsize=(max(5.2 * len(figure.panels), 7.0), 3.8), layout="constrained")
    canvas.suptitle(f"{figure.title} ({figure.kind})", fontsize=10)
    for axes, panel in zip(
        canvas.subplots(1, len(figure.panels), squeeze=False)[0], figure.panels, strict=True
    ):
        (_bars if panel.bars else _lines)(axes, panel)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.legend(fontsize=7)
    canvas.savefig(path, dpi=110)


def _lines(axes: Any, panel: Panel) -> None:
    names = list(dict.fromkeys(series.name for series in panel.series))
    for series in panel.series:
        colour = _COLOURS[names.index(series.name) % len(_COLOURS)]
        style = {"linestyle": "none", "marker": "x"} if series.source == "paper" else {"linestyle": "-"}
        label = f"{series.name} (paper)" if series.source == "paper" else series.name
        axes.plot(series.x, series.y, color=colour, label=label, **style)
    if panel.log_x:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)


def _bars(axes: Any, panel: Panel) -> None:
    labels = list(dict.fromkeys(str(x) for series in panel.series for x in series.x))
    width = 0.8 / len(panel.series)
    for index, series in enumerate(panel.series):
        paper = series.source == "paper"
        places = [labels.index(str(x)) + width * (index - (len(panel.series) - 1) / 2) for x in series.x]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.bar(
            places,
            series.y,
            width,
            label=f"{series.name} (paper)" if paper else series.name,
            edgecolor=colour,
            facecolor="none" if paper else colour,
        )
    axes.set_xticks(range(len(labels)), labels, fontsize=7)


def _value(value: float, row: Row) -> str:
    if math.isnan(value):
        return "–"
    if row.states:
        return "yes" if value == 1.0 else "no"
    return (
        f"{value:.3g}{' ' + row.unit if row.unit else ''}"
        if abs(value) < 1000
        else f"{value:.0f} {row.unit}".strip()
    )


def _error(row: Row) -> str:
    return "–" if math.isnan(row.error) or row.states else f"{row.error:+.1%}"


def _range(row: Row) -> str:
    return "–" if row.low == row.high else f"{_value(row.low, row)} – {_value(row.high, row)}"

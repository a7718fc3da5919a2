"""Reproduce figures of the paper: the paper's value beside ours, with a verdict per row.

    python -m launch.experiment --config=fig05 --traces=../shared/traces
    python -m launch.experiment --config=all --results=docs/results.md

A config is a Python file (`launch/configs/`), by name or path; its docstring has the claim, the paper's values and
the time it takes. Figures whose traces are not here are left out, and named (`python -m launch.fetch_traces`).
Each figure writes a CSV file of its curves and, where matplotlib is installed, a PNG file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from absl import flags
from tqdm import tqdm

from kvstore.errors import InvalidError
from launch.benchmarks.record import Machine
from launch.figures.assumptions import Assumptions
from launch.figures.lab import FILES, Lab
from launch.figures.render import count, table, write_csv, write_png
from launch.figures.report import measured_page, results_page
from launch.figures.result import Figure
from launch.huge_pages import use_huge_pages
from launch.process import UsageError, run_main, stop_on_signals
from launch.supervisor import END_SECONDS
from mooncake_jax.cost_model import CostModelFile

CONFIGS = Path(__file__).parent / "configs"

_CONFIG = flags.DEFINE_list(
    "config", None, "Figures: names such as fig05, paths of config files, or all.", required=True
)
_TRACES = flags.DEFINE_string(
    "traces",
    os.environ.get("MOONCAKE_TRACES", "../shared/traces"),
    "Folder of the public traces (also by the environment variable MOONCAKE_TRACES).",
)
_COST_MODEL = flags.DEFINE_string(
    "cost_model",
    "a800_llama3_70b",
    "Of the simulated nodes: a name or a JSON file. The paper's figures are A800.",
)
_OUT = flags.DEFINE_string("out", "build/figures", "Folder for CSV and PNG files; it is made when missing.")
_RESULTS = flags.DEFINE_string("results", "", "Also write everything to this Markdown page.")
_PNG = flags.DEFINE_bool(
    "png", True, "Write PNG files; needs matplotlib (pip install 'mooncake-jax[figures]')."
)
_REQUESTS = flags.DEFINE_integer("requests", 0, "Only the first so many of each trace, to try it; 0: all.", 0)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}")
    stop_on_signals(END_SECONDS)  # a cluster that a config started ends with it
    modules = {name: load(name) for name in _named(_CONFIG.value)}
    try:
        assumptions = Assumptions.load()
        traces = Path(_TRACES.value)
        progress = tqdm(desc="runs", unit="run", file=sys.stderr, disable=None)
        lab = Lab(traces, CostModelFile.load(_COST_MODEL.value), _REQUESTS.value or None, progress)
        out = Path(_OUT.value)
        out.mkdir(parents=True, exist_ok=True)
        figures: dict[str, tuple[Figure, float]] = {}
        for name, module in modules.items():
            missing = [FILES[trace] for trace in module.TRACES if trace not in lab.present()]
            if missing:
                progress.write(
                    f"{name} is left out: {', '.join(missing)} is not in {traces}", file=sys.stderr
                )
                continue
            start = time.perf_counter()
            figure = module.figure(lab, assumptions)
            figures[name] = figure, time.perf_counter() - start
            write_csv(out / f"{name}.csv", figure)
            if _PNG.value:
                write_png(out / f"{name}.png", figure)
            progress.write(f"\n{figure.title}\n\n{table(figure)}\n", file=sys.stdout)
        progress.close()
    except InvalidError as error:
        raise UsageError(str(error)) from error
    inside, outside, reported = count([figure for figure, _ in figures.values()])
    print(f"{inside} rows inside their tolerance, {outside} outside, {reported} reported only")
    if _RESULTS.value and figures:
        page = _page({name: figure for name, (figure, _) in figures.items()}, modules, lab, assumptions)
        Path(_RESULTS.value).parent.mkdir(parents=True, exist_ok=True)
        Path(_RESULTS.value).write_text(page)


def _page(
    figures: dict[str, Figure], modules: dict[str, ModuleType], lab: Lab, assumptions: Assumptions
) -> str:
    here = [name for name, figure in figures.items() if figure.kind in ("measured", "emulated")]
    if not here:
        return results_page(figures, modules, lab, assumptions)
    if len(figures) > 1:
        raise UsageError(
            f"--results: {', '.join(here)} measures this machine and has a page of its own; run it alone"
        )
    machine = Machine.here()
    text = f"{machine.cpu}, {machine.num_cores} cores, Python {machine.python}, jax {machine.jax}"
    return measured_page(here[0], figures[here[0]], modules[here[0]], text)


def _named(names: Sequence[str]) -> list[str]:
    everything = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem[:3] in ("fig", "equ"))
    return [each for name in names for each in (everything if name == "all" else [name])]


def load(name: str) -> ModuleType:
    """A config by name or path. Raises UsageError."""
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"launch.configs.{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        names = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")
        raise UsageError(f"--config: there is no {path}; there are {', '.join(names)}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    use_huge_pages()
    run_main(main)

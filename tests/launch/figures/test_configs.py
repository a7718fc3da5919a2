"""Every config runs on a short synthetic stand-in; and a sample of the published results, derived again."""

import math
import os
import re
from pathlib import Path

import pytest

from launch.experiment import CONFIGS, load
from launch.figures.assumptions import Assumptions
from launch.figures.lab import FILES, Lab
from launch.figures.render import table
from launch.figures.report import results_page
from launch.process import UsageError
from mooncake_jax.cost_model import CostModelFile
from mooncake_jax.synthetic_trace import generate
from mooncake_jax.trace import write_trace

ROOT = Path(__file__).parents[3]
PUBLIC = Path(os.environ.get("MOONCAKE_TRACES", ROOT.parent / "shared" / "traces"))
KINDS = {"conversation": "conversation", "synthetic": "document", "toolagent": "agent"}
SIMULATED = sorted(path.stem for path in CONFIGS.glob("fig*.py"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Generated traces under the public names, to see that the configs work; their figures mean nothing."""
    folder = tmp_path_factory.mktemp("traces")
    for name, file in FILES.items():
        write_trace(folder / file, generate(KINDS[name], 60, 30.0))
    return Lab(folder, CostModelFile.load("a800_llama3_70b"))


@pytest.fixture(scope="module")
def assumptions():
    loaded = Assumptions.load()
    return Assumptions(loaded.chosen, {name: values[:2] for name, values in loaded.ranges.items()})


@pytest.mark.parametrize("name", [*SIMULATED, "equation2"])
def test_a_config_makes_rows_and_curves(lab, assumptions, name):
    module = load(name)
    figure = module.figure(lab, assumptions)
    assert figure.rows
    assert all(math.isfinite(row.ours) for row in figure.rows)
    assert all(row.low <= row.ours <= row.high for row in figure.rows)
    assert figure.panels
    for panel in figure.panels:
        assert all(len(series.x) == len(series.y) > 0 for series in panel.series)
    assert module.__doc__.count("\n\n") >= 1  # the page takes the claim from it
    page = results_page({name: figure}, {name: module}, lab, assumptions)
    assert table(figure) in page


def test_a_figure_cannot_change_the_cost_model(lab, assumptions):
    with pytest.raises(ValueError, match="cost model"):
        lab.cluster_config(assumptions.chosen, costs=lab.costs)


def test_an_unknown_config_is_told_what_there_is():
    with pytest.raises(UsageError, match="fig05"):
        load("fig99")


def test_a_missing_trace_is_said(assumptions):
    with pytest.raises(FileNotFoundError, match="toolagent"):
        Lab(ROOT, CostModelFile.load("a800_llama3_70b")).workload("toolagent")


RESULTS = ROOT / "docs" / "results.md"


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here (MOONCAKE_TRACES)")
@pytest.mark.parametrize("name", ["fig14", "fig09", "equation2"])
def test_the_published_rows_come_out_again(name):
    lab = Lab(PUBLIC, CostModelFile.load("a800_llama3_70b"))
    figure = load(name).figure(lab, Assumptions.load())
    assert table(figure) in RESULTS.read_text()


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here (MOONCAKE_TRACES)")
def test_a_published_run_comes_out_again():
    lab = Lab(PUBLIC, CostModelFile.load("a800_llama3_70b"))
    seconds = lab.cluster("synthetic", Assumptions.load().chosen).gpu_seconds
    (published,) = re.findall(r"\| synthetic: Mooncake \| [\d.]+ s \| ([\d.]+) s \|", RESULTS.read_text())
    assert float(published) == pytest.approx(seconds, rel=0.005)

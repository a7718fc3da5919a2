"""The command lines of the simulator and the figures, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIMULATE = ("launch.simulate", "--trace=generated:conversation", "--requests=60", "--seconds=30")


def run(module, *flags):
    command = [sys.executable, "-m", module, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_trace_is_served_and_said_to_be_simulated():
    ended = run(*SIMULATE, "--cluster=3P2D")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("simulated, cost model a800_llama3_70b (modelled)")
    assert "60 / 0 / 0" in ended.stdout
    for line in ("TTFT (s)", "effective requests", "tokens reused", "moved between nodes", "GPU seconds"):
        assert line in ended.stdout


def test_a_sweep_names_the_best_and_a_search_the_smallest():
    ended = run(*SIMULATE, "--sweep=2P2D,4P4D", "--threshold=2,inf", "--ttft_slo=10")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("| 4P4D |") == 2
    assert "best: 4P4D" in ended.stdout
    ended = run(*SIMULATE, "--requests=10", "--smallest=90", "--most_nodes=8")
    assert ended.returncode == 0, ended.stderr
    assert "smallest:" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("launch.simulate", "--trace=/nowhere.jsonl"), "/nowhere.jsonl"),
        ((*SIMULATE, "--cluster=16"), "8P8D"),
        ((*SIMULATE, "--threshold=1,2"), "--sweep"),
        ((*SIMULATE, "--cluster=3P1D", "--nodes_per_group=2"), "does not divide"),
        (("launch.experiment", "--config=fig99"), "fig99"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_2(flags, complaint):
    ended = run(*flags)
    assert ended.returncode == 2, ended.stderr
    assert complaint in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_an_experiment_writes_its_curves_and_leaves_out_what_is_not_here(tmp_path):
    ended = run(
        "launch.experiment",
        "--config=equation2,fig06",
        f"--traces={tmp_path}",
        f"--out={tmp_path}",
        "--nopng",
    )
    assert ended.returncode == 0, ended.stderr
    assert "fig06 is left out" in ended.stderr
    assert "2 rows inside their tolerance, 0 outside, 0 reported only" in ended.stdout
    assert (tmp_path / "equation2.csv").read_text().startswith("panel,series,source")


def test_traces_that_are_missing_or_changed_are_said(tmp_path):
    ended = run("launch.fetch_traces", f"--traces={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    assert "conversation_trace.jsonl" in ended.stdout
    (tmp_path / "conversation_trace.jsonl").write_text("{}\n")
    ended = run("launch.fetch_traces", f"--traces={tmp_path}")
    assert ended.returncode == 2
    assert "sha256" in ended.stderr

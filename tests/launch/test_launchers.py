"""Every launcher explains its flags, and says in one line what is wrong with a bad one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("directory", "kvstore", "kvstore_ctl", "conductor", "frontend", "prefill", "decode", "cluster")
ENGINE = ("--name=x", "--directory=127.0.0.1:1", "--conductor=127.0.0.1:1")


def launch(role, *flags):
    command = [sys.executable, "-m", f"launch.{role}", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("role", ROLES)
def test_help_shows_the_command_and_every_flag(role):
    shown = launch(role, "--help").stdout
    assert f"python -m launch.{role}" in shown
    assert "--host" in shown
    if role in ("prefill", "decode", "cluster"):
        assert all(f"--{name}" in shown for name in ("model", "dtype", "max_tokens", "dram_bytes"))


@pytest.mark.parametrize(
    ("role", "flags", "complaint"),
    [
        ("directory", ("--prot=9000",), "prot"),
        ("directory", ("--port=70000",), "port"),
        ("directory", ("9000",), "'9000'"),
        ("conductor", (), "--directory"),
        ("conductor", ("--directory=127.0.0.1:1", "--policy=magic"), "magic"),
        ("conductor", ("--directory=127.0.0.1:1", "--kvcache_balancing_threshold=x"), "inf or auto"),
        ("conductor", ("--directory=127.0.0.1:1", "--cost_model=x"), "cost model x"),
        ("conductor_ctl", ("explain", "r"), "--conductor"),
        ("conductor_ctl", ("--conductor=127.0.0.1:1", "forget"), "explain REQUEST_ID"),
        ("conductor_ctl", ("--conductor=127.0.0.1:1", "explain", "r"), "127.0.0.1:1"),
        ("conductor_ctl", ("--conductor=127.0.0.1:1", "explain", "r", "s"), "'s'"),
        ("kvstore", ("--name=x", "--directory=127.0.0.1:1"), "--slot_bytes"),
        ("kvstore", ("--name=x", "--directory=127.0.0.1:1", "--model=/nowhere"), "/nowhere"),
        ("kvstore", ("--name=x", "--directory=127.0.0.1:1", "--slot_bytes=4096", "--rdma=a,a"), "twice"),
        ("kvstore_ctl", ("--directory=127.0.0.1:1", "--action=drain"), "--node"),
        ("cluster", ("--model=preset:tiny", "--ssd_path=/nowhere"), "--ssd_nbytes"),
        ("frontend", ("--model=preset:tiny",), "--conductor"),
        ("convert", ("--source=model.gguf",), "--target"),
        ("prefill", (*ENGINE, "--model=/nowhere"), "/nowhere"),
        ("prefill", (*ENGINE, "--model=preset:tiny", "--max_tokens=100000"), "512"),
        ("prefill", (*ENGINE, "--model=preset:tiny", "--chunk=64"), "--mesh"),
        ("prefill", (*ENGINE, "--model=preset:tiny", "--engine=emulated", "--mesh=stage:2"), "real devices"),
        ("prefill", (*ENGINE, "--model=preset:tiny", "--mesh=stage:3"), "do not divide over stage:3"),
        ("decode", (*ENGINE, "--model=preset:tiny", "--dtype=int4"), "int4"),
        ("decode", (*ENGINE, "--model=preset:tiny", "--cores=a,b"), "--cores"),
        ("decode", (*ENGINE, "--model=preset:tiny", "--cores=4000"), "--cores=4000"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_2(role, flags, complaint):
    ended = launch(role, *flags)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert complaint in ended.stderr
    assert f"launch.{role}" in ended.stderr
    assert ended.stdout == ""


def test_a_taken_port_is_said_in_one_line():
    first = subprocess.Popen(
        [sys.executable, "-m", "launch.directory"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdout
        port = first.stdout.readline().rpartition(":")[2].strip()
        ended = launch("directory", f"--port={port}")
        first.terminate()
    assert first.returncode == 0
    assert ended.returncode == 1
    assert port in ended.stderr.splitlines()[-1]

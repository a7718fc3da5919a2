"""The bench's command line; what it cannot do, it says in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--suite=schedule", "--trace=/nowhere"), "/nowhere"),
        (("--suite=store", "--peers=/nowhere"), "/nowhere"),
        (("--suite=magic",), "magic"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_2(flags, complaint):
    command = [sys.executable, "-m", "launch.bench", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    assert complaint in ended.stderr
    assert len(ended.stderr.splitlines()) == 1

"""A launcher that a signal stops says so in one line, and what it had to undo is undone."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = textwrap.dedent(
    """
    import signal
    import time
    from launch.process import run_main, stop_on_signals

    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

    def main(_):
        if {handled}:
            stop_on_signals()
        try:
            print("began", flush=True)
            time.sleep(600)
        finally:
            print("undone", flush=True)

    run_main(main)
    """
)


@pytest.mark.parametrize(
    ("number", "handled"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGINT, False)]
)
def test_a_signal_is_one_line(number, handled):
    command = [sys.executable, "-c", PROGRAM.format(handled=handled)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "began\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert out == "undone\n"
    assert err.endswith(": stopped\n")
    assert len(err.splitlines()) == 1

"""Roles of the system as processes of their own, for as long as a benchmark needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from launch.process import PARENT

_END_SECONDS = 20


@contextmanager
def role(name: str, *flags: str) -> Iterator[str]:
    """`python -m launch.NAME FLAGS…`; yields the address it serves.

    Raises RuntimeError when it ends before it is ready.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"launch.{name}", *flags],
        env={**os.environ, PARENT: str(os.getpid())},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("ready "):
            raise RuntimeError(
                f"launch.{name} {' '.join(flags)} ended with exit status {process.wait(_END_SECONDS)}"
            )
        yield line.split()[2]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

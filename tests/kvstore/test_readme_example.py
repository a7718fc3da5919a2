"""The example of the README, as it stands there: two processes share NumPy arrays."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def example(address: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code.count("\n") <= 20
    assert "127.0.0.1:9000" in code
    return code.replace("127.0.0.1:9000", address)


def test_it_does_what_it_says(cluster):
    store = cluster.node("store-0", slot_nbytes=4000)
    code = example(cluster.address)

    def run(verb: str) -> str:
        command = [sys.executable, "-W", "error", "-c", code, verb]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
        ).stdout.strip()

    assert run("put") == "['stored', 'stored']"
    assert store.node.flush(20)
    assert run("get") == "[True, True] [0. 1. 2.] [7. 7. 7.]"

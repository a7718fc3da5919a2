"""Rails of the upstream engine in its TCP mode, in a process of their own: it keeps threads and sockets of its own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.transfer import TransferEngine, Upstream

ROOT = Path(__file__).parents[4]
HAS_UPSTREAM = importlib.util.find_spec("mooncake") is not None
SCRIPT = """
import contextlib, json, os
import numpy as np
from kvstore.transfer import *

class Doorman:
    def admit(self, permit, offsets, lengths):
        if permit != 7:
            raise TransferError("no permit")
        return contextlib.nullcontext(float("inf"))

upstream = Upstream(devices=("one", "two"), protocol="tcp")
owner, engine = (TransferEngine(host_id=name, upstream=upstream, timeout_seconds=30) for name in "ab")
memory = np.random.default_rng(1).integers(0, 256, 1 << 23, np.uint8)
segment = owner.register_local_memory(memory, name="m")
guarded_memory = np.zeros(1000, np.uint8)
guarded = owner.register_local_memory(guarded_memory, name="guarded", guard=Doorman())
found = {"sessions": len(owner.peer.sessions), "rails": []}

sink = np.zeros(1 << 23, np.uint8)
engine.register_local_memory(sink, name="sink")
engine.transfer([TransferRequest(READ, memoryview(sink), segment, 0)])
found["read"] = bool((sink == memory).all())
source = np.arange(1000, dtype=np.uint8)  # not registered
engine.transfer([TransferRequest(WRITE, memoryview(source)[i : i + 10], segment, 2 * i) for i in range(0, 1000, 10)])
found["write"] = all((memory[2 * i : 2 * i + 10] == source[i : i + 10]).all() for i in range(0, 1000, 10))
found["rails"] = [rail.nbytes > 0 for rail in engine.rails()]
found["bytes"] = {k: v for k, v in engine.counters().items() if v}
engine.transfer([TransferRequest(WRITE, memoryview(source), guarded, 0, 7)])
found["guarded"] = bool((guarded_memory == source).all())
found["guarded_by_tcp"] = engine.counters()["tcp_write"]
owner.close()
try:
    engine.transfer([TransferRequest(READ, memoryview(sink), segment, 0)])
except TransferError as error:
    found["gone"] = str(error)
engine.close()
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not HAS_UPSTREAM, reason="mooncake-transfer-engine is not installed (extra rdma)")
def test_upstream_engines_are_rails_guarded_memory_goes_by_tcp():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    gone = found.pop("gone")
    assert "Connection refused" in gone
    assert found == {
        "sessions": 2,
        "rails": [True, True],
        "read": True,
        "write": True,
        "bytes": {"mooncake_read": 1 << 23, "mooncake_write": 1000},
        "guarded": True,
        "guarded_by_tcp": 1000,
    }


@pytest.mark.skipif(HAS_UPSTREAM, reason="mooncake-transfer-engine is installed")
def test_without_the_package_it_says_what_to_install():
    with pytest.raises(ImportError, match=r"pip install 'mooncake-jax\[rdma\]'"):
        TransferEngine(host_id="a", upstream=Upstream(devices=("mlx5_0",)))

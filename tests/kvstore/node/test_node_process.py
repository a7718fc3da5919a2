"""A store node in a process of its own that freezes and dies: gets stay bounded, and its memory is swept."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

NODE = """
import sys
from kvstore import Node, NodeConfig
from kvstore.rpc import Server
from kvstore.transfer import TransferEngine

engine = TransferEngine(host_id="far")
node = Node(NodeConfig("far", "far", 8 * 1024, 1024), engine)
server = Server(node.handlers())
node.join(sys.argv[1], server.address)
node.flush(20)
print(node.segment.shm_path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process(cluster):
    child = subprocess.Popen(
        [sys.executable, "-c", NODE, cluster.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield child
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        pipe.close()


def test_a_frozen_node_and_a_dead_one(cluster, process, eventually):
    shm_path = process.stdout.readline().strip()
    assert os.path.exists(shm_path)
    rng = random.Random(1)
    keys, data = [rng.randbytes(16) for _ in range(3)], [rng.randbytes(1000) for _ in range(3)]
    client = cluster.client()
    eventually(lambda: client.put(keys, data, 300) == ["stored"] * 3 or client.exists(keys) == [True] * 3)
    assert client.get(keys) == data

    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    started = time.monotonic()
    assert client.get(keys) == [None] * 3
    assert time.monotonic() - started < 10
    eventually(lambda: client.replica.nodes() == [])
    assert client.exists(keys) == [False] * 3

    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: client.get(keys) == data)

    process.kill()
    process.wait()
    started = time.monotonic()
    assert client.get(keys) == [None] * 3
    assert time.monotonic() - started < 10
    eventually(lambda: client.replica.nodes() == [])
    cluster.node("b")  # its start sweeps what dead processes left
    assert not os.path.exists(shm_path)

"""`launch.kvstore_ctl` and metrics over a running store."""

from __future__ import annotations

import random
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.node.metrics import MetricsServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ctl(cluster):
    """`ctl(*flags)`: exit status and output."""

    def run(*flags: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "launch.kvstore_ctl", f"--directory={cluster.address}", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout

    return run


def test_look_drain_and_drop(cluster, ctl, tmp_path):
    rng = random.Random(2)
    keys, data = [rng.randbytes(16) for _ in range(6)], [rng.randbytes(500) for _ in range(6)]
    a = cluster.node("a", num_slots=4, ssd=tmp_path / "ssd")
    cluster.node("b", num_slots=20)
    client = Client(cluster.address, engine=a.engine, home=a.node, namespace="mine")
    for start in (0, 3):
        assert client.put(keys[start : start + 3], data[start : start + 3]) == ["stored"] * 3
        assert a.node.spill(20)
    assert client.get(keys[-1:]) == data[-1:]
    cluster.settle()
    status, shown = ctl()
    titles, of_a, of_b = (line.split() for line in shown.splitlines())
    row = dict(zip(titles, of_a, strict=True))
    assert status == 0
    assert (row["node"], row["state"], row["objects"], row["dram"]) == ("a", "serving", "6", "4/4")
    assert (row["ssd"].split("/")[0], row["hits"], row["namespaces"]) == ("6", "100.0%", "mine=6")
    assert of_b[0] == "b"
    status, shown = ctl("--action=keys")
    assert status == 0
    assert sorted(line.split()[0] for line in shown.splitlines()[1:]) == sorted(key.hex() for key in keys)
    assert shown.count("a:ssd") == 2
    assert ctl("--action=drain", "--node=a") == (
        0,
        "6 of 6 objects that were short of replicas have them now\n",
    )
    assert client.put([rng.randbytes(16)], [b"x"]) == ["no_room"]
    assert ctl("--action=drop_namespace", "--namespace=mine") == (0, "12 objects of mine removed\n")
    assert client.get(keys) == [None] * 6
    client.close()


def test_metrics(cluster, tmp_path):
    a = cluster.node("a", ssd=tmp_path / "ssd")
    client = cluster.client(a)
    key = bytes(16)
    client.put([key], [b"x"])
    client.get([key, bytes(15) + b"x"])
    metrics = MetricsServer(a.node, a.engine)
    with urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    metrics.close()
    for line in (
        'mooncake_store_hit_total{node="a"} 1.0',
        'mooncake_store_missed_total{node="a"} 1.0',
        'mooncake_store_committed{node="a"} 1.0',
        'mooncake_store_ssd_damaged_total{node="a"} 0.0',
        'mooncake_store_transfer_total{node="a",path="tcp_read"} 0.0',
    ):
        assert line in lines

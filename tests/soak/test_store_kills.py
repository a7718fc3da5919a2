"""SIGKILL of a store node, of the directory and of a writer under load: no wrong byte, no leak, back by itself."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.stores import Cluster, wait_until
from soak.store_process import LEASE_SECONDS, NBYTES, NUM_SLOTS, PART, content

from kvstore import Client
from kvstore.errors import StoreError
from kvstore.messages import NODE
from kvstore.rpc import Empty, Stub

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("STORE_KILL_ROUNDS", "20"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(120 + 30 * ROUNDS)]


class Process:
    """One life after the other of a part of the store."""

    def __init__(self, *arguments: str):
        self._arguments = arguments
        self.start()

    def start(self, **replaced: str) -> None:
        self._arguments = tuple(replaced.get(a, a) for a in self._arguments)
        self._child = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/soak/store_process.py"), *self._arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        return self._child.stdout.readline().strip()

    def kill(self) -> list[str]:
        """SIGKILL; what it had said and nobody had read."""
        if self._child.stdout.closed:
            return []
        self._child.kill()
        said = self._child.stdout.read().splitlines()
        self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()
        return said


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """`start(part, …)`; what still runs in the end is killed."""
    processes: list[Process] = []

    def run(*arguments: str) -> Process:
        processes.append(Process(*arguments))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()


def books(port: str) -> dict[str, int]:
    """Of the node at this port, when it answers."""
    found: list[dict[str, int]] = []

    def ask() -> bool:
        stub = Stub(f"127.0.0.1:{port}", NODE)
        try:
            found.append(stub.stats(Empty()).stats)
        except StoreError:
            return False
        finally:
            stub.close()
        return True

    wait_until(ask)
    return found[0]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


class Load:
    """Threads that put and get without pause, and judge every byte."""

    def __init__(self, clients: list[Client], keys: list[bytes]):
        self._clients, self._keys = clients, keys
        self._stopped = threading.Event()
        self.wrong: list[bytes] = []
        self.errors: list[Exception] = []
        self.num_got = 0
        self._threads = [
            threading.Thread(target=self._run, args=(client, seed)) for seed, client in enumerate(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Client, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopped.wait(0.002):
            some = rng.sample(self._keys, 4)
            try:
                if rng.random() < 0.4:
                    client.put(some, [content(key) for key in some], PART)
                for key, got in zip(some, client.get(some), strict=True):
                    if got is not None:
                        self.num_got += 1
                        if got != content(key):
                            self.wrong.append(key)
            except Exception as error:
                self.errors.append(error)
                return

    def check(self) -> None:
        assert not self.wrong
        assert not self.errors

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self.check()


def keys(count: int) -> list[bytes]:
    rng = random.Random(11)
    return [rng.randbytes(16) for _ in range(count)]


def test_a_node_with_an_ssd_tier_is_killed_again_and_again(cluster, start, tmp_path):
    rng, many = random.Random(1), keys(80)
    process = start("node", cluster.address, "0", str(tmp_path / "ssd"))
    port = process.line()
    clients = [cluster.client(host_id=host, timeout_seconds=5.0) for host in ("far", "killed")]
    load, pause = Load(clients, many), threading.Event()
    survivors = 0
    try:
        for _ in range(ROUNDS):
            wait_until(lambda: clients[0].put(many[:2], [content(k) for k in many[:2]]) != ["failed"] * 2)
            before = load.num_got
            wait_until(lambda before=before: load.num_got > before + 20 or load.errors)
            pause.wait(0.3 * rng.random())
            process.kill()
            process.start(**{"0": port})
            assert process.line() == port
            stats = books(port)
            survivors += stats["ssd_held"]
            assert stats["ssd_damaged"] == 0
            load.check()
    finally:
        load.stop()
    wait_until(lambda: clients[0].replica.nodes())
    for key in many:
        assert clients[0].get([key])[0] in (None, content(key))
    wait_until(lambda: not any(books(port)[name] for name in ("leases", "reserved", "draining")))
    stats = books(port)
    assert stats["free"] + stats["committed"] == stats["slots"] == NUM_SLOTS
    assert stats["ssd_damaged"] == 0, "SIGKILL leaves a whole state"
    assert survivors > 0


def test_the_directory_is_killed_again_and_again(cluster, start):
    rng, many, pause = random.Random(2), keys(60), threading.Event()
    process = start("directory", "0")
    port = process.line()
    cluster.address = f"127.0.0.1:{port}"
    stores = [cluster.node(name, num_slots=24, slot_nbytes=NBYTES) for name in ("a", "b")]
    clients = [cluster.client(store, timeout_seconds=5.0) for store in stores]
    clients.append(cluster.client(timeout_seconds=5.0))
    load = Load(clients, many)
    try:
        for number in range(ROUNDS):
            pause.wait(0.3 * rng.random())
            process.kill()
            before = load.num_got
            wait_until(lambda before=before: load.num_got > before + 20 or load.errors)
            process.start(**{"0": port})
            assert process.line() == port
            wait_until(lambda: all(client.replica.in_sync for client in clients))
            wait_until(lambda: len(clients[2].replica.nodes()) == 2)
            load.check()
            if number == ROUNDS - 1:
                cluster.node("new", num_slots=4, slot_nbytes=NBYTES)
                wait_until(lambda: len(clients[2].replica.nodes()) == 3)
    finally:
        load.stop()
    for store in stores:
        assert store.node.flush(20)
        held = [key for key, here in zip(many, store.node.exists(many), strict=True) if here]
        wait_until(lambda store=store, held=held: clients[2].replica.keys(store.node.name) == set(held))
        wait_until(lambda store=store: store.node.stats()["leases"] == 0)


def test_a_writer_is_killed_again_and_again(cluster, start):
    rng, pause = random.Random(3), threading.Event()
    store = cluster.node("a", num_slots=NUM_SLOTS, slot_nbytes=NBYTES, lease_seconds=LEASE_SECONDS)
    client = cluster.client()
    for number in range(ROUNDS):
        process = start("writer", cluster.address, str(number))
        lines = [process.line()]
        pause.wait(0.1 * rng.random())
        lines += process.kill()
        last = bytes.fromhex(lines[-1])
        torn = [last[start : start + 16] for start in range(0, len(last), 16)]
        for key, got in zip(torn, client.get(torn), strict=True):
            assert got in (None, content(key))
        # The killed writer's last request may still wait at the node: its reservation lives one lease.
        whole = [content(key) for key in torn]
        wait_until(lambda torn=torn, whole=whole: set(client.put(torn, whole, PART)) <= {"stored", "present"})
        wait_until(lambda: not any(store.node.stats()[name] for name in ("reserved", "draining")))
        assert client.get(torn) == whole
        stats = store.node.stats()
        assert stats["free"] + stats["committed"] == stats["slots"]

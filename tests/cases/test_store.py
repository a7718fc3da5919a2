"""Faults of key-value cache stores that were reported in public, against this one.

More of their kind are in `tests/kvstore` (`client/test_client.py`: slow readers, dead writers, stale entries,
restarts; `node/test_late_writes.py`, `node/ssd/`, `test_block.py`: weak hashes, salts, hash seeds) and in
`tests/soak/test_store_*.py`.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
from pathlib import Path

import pytest
from e2e.cluster import LocalCluster
from fakes.engine import FORMAT, answer
from fakes.stores import Cluster

from kvstore import chain_keys, root_key
from kvstore.block import pool_fingerprint

Z = FORMAT.block_tokens
NBYTES = 1000


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


def prompt(number: int) -> list[int]:
    return [(31 * i + 7 * number + i * i) % 200 for i in range(8 * Z + 1)]


def content(key: bytes, nbytes: int = NBYTES) -> bytes:
    return random.Random(key).randbytes(nbytes)


def keys(count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


def ask_all(system: LocalCluster, numbers: range) -> list[int]:
    """Ask prompts, compare with the oracle, let the disk keep up; how many tokens of each were reused."""
    reused = []
    for number in numbers:
        got = system.ask(prompt(number))
        assert got.tokens == answer(prompt(number), 6), number
        reused.append(got.first.cached_tokens)
        assert system.instances["prefill-0"].home.spill(20)
    return reused


def test_reuse_from_the_lower_tier_answers_as_a_cold_run_also_after_a_restart(tmp_path):
    """sgl-project/sglang#27504: hits in memory are fine, hits that come back from disk are garbage."""
    with LocalCluster(num_prefill=1, num_decode=1, num_home_blocks=24, ssd=tmp_path) as system:
        assert ask_all(system, range(40)) == [0] * 40
        before = system.instances["prefill-0"].home.stats()["ssd_read"]
        assert ask_all(system, range(40)) == [8 * Z] * 40
        stats = system.instances["prefill-0"].home.stats()
        assert stats["ssd_read"] - before > 200, "memory holds three prompts: the disk answered"
        assert stats["ssd_damaged"] == 0
    with LocalCluster(num_prefill=1, num_decode=1, num_home_blocks=24, ssd=tmp_path) as system:
        assert ask_all(system, range(40)) == [8 * Z] * 40


@pytest.mark.parametrize("harm", ["truncate", "flip"])
def test_a_hit_that_cannot_be_loaded_is_recomputed_within_the_same_request(tmp_path, harm):
    """vllm-project/vllm#49176, LMCache/LMCache#1690: lookup says hit, loading fails, lookup says hit again."""
    with LocalCluster(num_prefill=1, num_decode=1, num_home_blocks=24, ssd=tmp_path) as system:
        ask_all(system, range(10))
        slots = tmp_path / "prefill-0" / "slots"
        if harm == "truncate":
            os.truncate(slots, 0)
        else:
            raw = bytearray(slots.read_bytes())
            raw[::512] = bytes(byte ^ 1 for byte in raw[::512])
            slots.write_bytes(raw)
        assert ask_all(system, range(1)) == [0]
        stats = system.instances["prefill-0"].home.stats()
        assert stats["ssd_damaged"] >= 1
        assert ask_all(system, range(1)) == [8 * Z], "the bad copies were dropped, the new ones are kept"


def test_a_store_that_survives_its_model_gives_nothing_to_another_one(cluster, tmp_path):
    """vllm-project/vllm#44250, LMCache/LMCache#2961: other weights under the same name hit old entries."""
    tokens = list(range(4 * Z))
    pools = [pool_fingerprint(weights, FORMAT) for weights in (b"first", b"second")]
    ours, theirs = (chain_keys(root_key(pool), tokens, Z) for pool in pools)
    salted = chain_keys(root_key(pools[0], "tenant"), tokens, Z)
    store = cluster.node("a", ssd=tmp_path)
    client = cluster.client(store)
    assert client.put(ours, [content(key) for key in ours]) == ["stored"] * 4
    assert store.node.spill(20)
    cluster.stop(store)
    client = cluster.client(cluster.node("a", ssd=tmp_path))
    assert client.get(theirs) == client.get(salted) == [None] * 4
    assert client.get(ours) == [content(key) for key in ours]


def test_probing_all_keys_all_the_time_stops_no_put(cluster):
    """kvcache-ai/Mooncake#2187, #3331: existence checks renew leases until nothing can be evicted."""
    store = cluster.node("a", num_slots=64)
    client, prober = cluster.client(store), cluster.client()
    many, stopped, num_probes = keys(2000), threading.Event(), 0

    def probe() -> None:
        nonlocal num_probes
        while not stopped.wait(0.001):
            prober.exists(many[:256], fresh=num_probes % 10 == 0)
            num_probes += 1

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        for start in range(0, len(many), 8):
            some = many[start : start + 8]
            assert client.put(some, [content(key) for key in some]) == ["stored"] * 8
            client.exists(many[:64])
    finally:
        stopped.set()
        thread.join()
    assert num_probes > 0
    assert client.exists(many) == [False] * (len(many) - 64) + [True] * 64, "LRU, as seen from outside"
    assert client.put(keys(1, seed=5), [bytes(1025)]) == ["too_large"]


def test_sizes_and_removals_of_any_order_leave_room_for_the_largest(cluster):
    """kvcache-ai/Mooncake#2797: free space is in pieces, and a large object fails with plenty free."""
    store = cluster.node("a", num_slots=64)
    client, rng = cluster.client(store), random.Random(3)
    held: list[bytes] = []
    for key in keys(600):
        assert client.put([key], [content(key, rng.choice((1, 60, 512, 1024)))]) == ["stored"]
        held.append(key)
        if rng.random() < 0.4:
            client.remove([held.pop(rng.randrange(len(held)))])
    largest = keys(64, seed=7)
    assert client.put(largest, [content(key, 1024) for key in largest]) == ["stored"] * 64
    assert client.get(largest) == [content(key, 1024) for key in largest]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 2 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system of its own needs root: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_fuller_than_the_cap_says_stops_nobody(cluster, small_disk):
    """LMCache/LMCache#4564, kvcache-ai/Mooncake#2475: the disk fills up, serving stops; after a restart the
    books begin at 0."""
    many = keys(900)
    ssd = small_disk / "tier"
    for life in range(3):
        store = cluster.node("a", ssd=ssd, ssd_nbytes=8_000_000)
        client = cluster.client(store)
        assert (life == 0) == (store.node.stats()["ssd_held"] == 0)
        for start in range(0, len(many), 8):
            some = many[start : start + 8]
            assert set(client.put(some, [content(key) for key in some])) <= {"stored", "present"}
            store.node.spill(20)
            assert client.get(some) == [content(key) for key in some]
        assert store.node.stats()["ssd_failed"] > 0
        for key in many[:100]:
            assert client.get([key])[0] in (None, content(key))
        assert store.node.stats()["ssd_damaged"] == 0
        cluster.forget(client)
        cluster.stop(store)


def test_the_cap_holds_across_restarts_beside_a_foreign_file_and_when_it_shrinks(cluster, tmp_path):
    """kvcache-ai/Mooncake PR#2474."""
    many, ssd = keys(600), tmp_path / "ssd"
    for life, cap in enumerate((1_000_000, 1_000_000, 600_000)):
        store = cluster.node("a", ssd=ssd, ssd_nbytes=cap)
        client = cluster.client(store)
        for start in range(0, len(many), 8):
            some = many[start : start + 8]
            client.put(some, [content(key) for key in some])
            assert store.node.spill(20)
            used = sum(path.lstat().st_blocks * 512 for path in (ssd, *ssd.rglob("*")))
            assert used <= cap
        assert store.node.stats()["ssd_evicted"] > 0
        cluster.forget(client)
        cluster.stop(store)
        if life == 0:
            (ssd / "foreign").write_bytes(bytes(200_000))

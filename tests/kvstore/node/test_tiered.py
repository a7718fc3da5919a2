"""A node with an SSD tier: what leaves DRAM is still there, for its own process and for others."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from kvstore import Node, NodeConfig
from kvstore import messages as m
from kvstore.errors import InvalidError
from kvstore.transfer import TransferEngine

NBYTES, PART = 1000, 300
NUM_SLOTS = 8


def blocks(count: int, seed: int = 1) -> tuple[list[bytes], list[bytes]]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)], [rng.randbytes(NBYTES) for _ in range(count)]


def fill(store, client, keys: list[bytes], data: list[bytes]) -> None:
    """Put more than DRAM holds, slowly enough for the disk."""
    for start in range(0, len(keys), 4):
        some = slice(start, start + 4)
        assert client.put(keys[some], data[some], PART) == ["stored"] * len(keys[some])
        assert store.node.spill(20)


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def test_every_tier_answers_the_owner_and_others(cluster, ssd):
    store, other = cluster.node("a", ssd=ssd), cluster.node("b")
    home, far = cluster.client(store), cluster.client(other)
    keys, data = blocks(40)
    fill(store, home, keys, data)
    cluster.settle()
    tiers = [some["a"] for some in far.replica.replicas(keys)]
    assert tiers == ["ssd"] * (40 - NUM_SLOTS) + ["dram"] * NUM_SLOTS
    assert store.node.exists(keys) == home.exists(keys) == far.exists(keys) == [True] * 40
    before = store.node.stats()["ssd_read"]
    for start in range(0, 40, 4):
        assert far.get(keys[start : start + 4]) == data[start : start + 4]
    assert store.node.stats()["ssd_read"] == before + 40, "in turn, each was pushed out by the others"
    for start in range(0, 40, 4):
        assert home.get(keys[start : start + 4]) == data[start : start + 4]
    assert home.counters()["home"] == 40
    assert far.counters()["remote"] == 40
    cluster.settle()
    assert [some["a"] for some in far.replica.replicas(keys[-4:])] == ["dram"] * 4


def test_a_restarted_node_announces_what_its_journal_holds(cluster, ssd):
    keys, data = blocks(20)
    store = cluster.node("a", ssd=ssd)
    fill(store, cluster.client(store), keys, data)
    cluster.stop(store)
    again = cluster.node("a", ssd=ssd)
    assert again.node.epoch != store.node.epoch
    far = cluster.client()
    cluster.settle()
    assert far.replica.replicas(keys) == [{"a": "ssd"}] * 20
    for start in range(0, 20, 4):
        assert far.get(keys[start : start + 4]) == data[start : start + 4]


def test_putting_again_what_is_on_ssd_is_present_and_touches_no_disk(cluster, ssd):
    store = cluster.node("a", ssd=ssd)
    home = cluster.client(store)
    keys, data = blocks(20)
    fill(store, home, keys, data)
    assert home.put(keys, data, PART) == ["present"] * 20
    assert cluster.client().put(keys[:2], data[:2], PART) == ["present"] * 2
    assert store.node.stats()["ssd_read"] == 0


def test_removed_is_removed_from_both_tiers_and_for_good(cluster, ssd):
    store = cluster.node("a", ssd=ssd)
    home = cluster.client(store)
    keys, data = blocks(20)
    fill(store, home, keys, data)
    assert home.remove(keys[:10] + keys[-4:]) == [True] * 14
    assert home.get(keys) == [None] * 10 + data[10:16] + [None] * 4
    cluster.settle()
    assert [bool(some) for some in home.replica.replicas(keys)] == [False] * 10 + [True] * 6 + [False] * 4
    cluster.stop(store)
    assert cluster.node("a", ssd=ssd).node.exists(keys) == [False] * 10 + [True] * 6 + [False] * 4


def test_a_damaged_object_is_a_miss_everywhere_and_can_be_put_again(cluster, ssd):
    store = cluster.node("a", ssd=ssd)
    home, far = cluster.client(store), cluster.client()
    keys, data = blocks(20)
    fill(store, home, keys, data)
    cluster.settle()
    os.truncate(ssd / "slots", 5 * 4096 + 10)
    assert far.get(keys[:8]) == data[:5] + [None] * 3
    assert home.get(keys[:8]) == data[:5] + [None] * 3
    assert store.node.stats()["ssd_damaged"] == 3
    cluster.settle()
    assert [bool(some) for some in far.replica.replicas(keys[:8])] == [True] * 5 + [False] * 3
    assert home.put(keys[5:8], data[5:8], PART) == ["stored"] * 3
    assert home.get(keys[5:8]) == data[5:8]


def test_with_all_slots_leased_an_object_on_ssd_is_a_miss_that_costs_nobody_his_bytes(cluster, ssd):
    store = cluster.node("a", ssd=ssd)
    home = cluster.client(store)
    keys, data = blocks(20)
    fill(store, home, keys, data)
    with store.node.lease(keys[-NUM_SLOTS:]) as lease:
        assert home.get(keys[:2]) == [None, None]
        assert [bytes(lease.view(index)) for index in range(NUM_SLOTS)] == data[-NUM_SLOTS:]
    assert home.get(keys[:2]) == data[:2]


def test_a_lease_of_more_than_dram_holds_keeps_what_it_has_and_a_get_takes_turns(cluster, ssd):
    store = cluster.node("a", ssd=ssd)
    home, far = cluster.client(store), cluster.client()
    keys, data = blocks(20)
    fill(store, home, keys, data)
    assert home.get(keys) == data
    cluster.settle()
    assert far.get(keys) == data
    assert far.counters()["stale"] == 0
    with store.node.lease(keys) as lease:
        assert lease.held.count(True) == NUM_SLOTS
        assert lease.waiting == [index for index, held in enumerate(lease.held) if not held]
        for index, held in enumerate(lease.held):
            if held:
                assert bytes(lease.view(index)) == data[index]


def test_many_readers_of_one_object_read_the_disk_once(cluster, ssd):
    store = cluster.node("a", ssd=ssd, num_slots=16)
    keys, data = blocks(40)
    fill(store, cluster.client(store), keys, data)
    barrier, found = threading.Barrier(6), []

    def read() -> None:
        barrier.wait()
        with store.node.lease(keys[:3]) as lease:
            found.append([bytes(lease.view(index)) for index in range(3)])

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [data[:3]] * 6
    assert store.node.stats()["ssd_read"] == 3


def test_a_disk_that_cannot_be_used_leaves_a_node_of_dram(tmp_path, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    engine = TransferEngine(host_id="h")
    node = Node(NodeConfig("a", "h", 8192, 1024, ssd_path=str(in_the_way), ssd_nbytes=1_000_000), engine)
    assert "goes without its SSD tier" in caplog.text
    assert node.reserve(blocks(1)[0], NBYTES, PART).accepted == [True]
    node.close()
    engine.close()


def test_sizes_that_cannot_work_are_refused():
    for fields, match in (
        ({"ssd_path": "/x"}, "both or none"),
        ({"ssd_nbytes": 5}, "both or none"),
        ({"ssd_path": "/x", "ssd_nbytes": 5000}, "do not hold one slot"),
    ):
        with pytest.raises(InvalidError, match=match):
            NodeConfig("a", "h", 8192, 1024, **fields)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_puts_never_wait_for_the_disk(cluster, ssd, monkeypatch, num_slots):
    """The disk stands still: every put is taken, what could not be written in time is lost, and counted."""
    store = cluster.node("a", ssd=ssd, num_slots=num_slots)
    home = cluster.client(store)
    keys, data = blocks(10)
    stuck, pwrite = threading.Event(), os.pwrite

    def wait_then_write(*args) -> int:
        stuck.wait(30)
        return pwrite(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", wait_then_write)
        for key, value in zip(keys, data, strict=True):
            assert home.put([key], [value], PART) == ["stored"]
        stuck.set()
        assert store.node.spill(20)
    found = home.get(keys)
    assert found[-num_slots:] == data[-num_slots:]
    assert all(got in (None, value) for got, value in zip(found, data, strict=True))
    assert store.node.stats()["ssd_skipped"] == found.count(None) > 0


def test_an_object_removed_while_it_is_written_does_not_come_back(cluster, ssd, monkeypatch, eventually):
    store = cluster.node("a", ssd=ssd, num_slots=2)
    home = cluster.client(store)
    keys, data = blocks(2)
    writing, go_on, pwrite = threading.Event(), threading.Event(), os.pwrite

    def wait_then_write(*args) -> int:
        writing.set()
        go_on.wait(30)
        return pwrite(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", wait_then_write)
        home.put(keys, data, PART)
        assert writing.wait(20)
        assert home.remove(keys[:1]) == [True]
        go_on.set()
        assert store.node.spill(20)
    assert home.get(keys) == [None, data[1]]
    cluster.stop(store)
    again = cluster.client(cluster.node("a", ssd=ssd, num_slots=2))
    assert again.get(keys) == [None, data[1]]


def test_a_lease_from_elsewhere_is_answered_before_a_slow_disk_is(cluster, ssd, monkeypatch):
    store = cluster.node("a", ssd=ssd)  # of whose time the disk may take 1 s
    keys, data = blocks(20)
    fill(store, cluster.client(store), keys, data)
    now, preadv = [time.monotonic()], os.preadv

    def slow(*args) -> int:
        now[0] += 0.6
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(store.node._store, "_clock", lambda: now[0])
    (handler,) = [handler for _, handler in store.node.handlers()]
    reply = handler.lease(m.NodeKeys(store.node.epoch, keys[:6]))
    assert [held is not None for held in reply.held] == [True] * 2 + [False] * 4
    handler.release(m.HandleRequest(store.node.epoch, reply.handle))

"""Replicas on demand: more, fewer, elsewhere; nodes that drain and nodes that are lost."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import InvalidError, NotFoundError

NBYTES, PART = 1000, 300


def blocks(count: int, seed: int = 1) -> tuple[list[bytes], list[bytes]]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)], [rng.randbytes(NBYTES) for _ in range(count)]


def holders(client, keys: list[bytes]) -> list[set[str]]:
    return [set(some) for some in client.replica.holders(keys)]


def test_add_and_drop_on_a_named_node(cluster):
    a, b = cluster.node("a"), cluster.node("b", num_slots=2)
    keys, data = blocks(3)
    cluster.client(a).put(keys, data, PART)
    cluster.settle()
    client = cluster.client()
    unknown = blocks(1, seed=9)[0]
    assert client.change_replica([*keys[:2], *unknown], add="b") == ["done", "done", "missing"]
    assert client.change_replica(keys[:1], add="b") == ["unchanged"]
    assert client.change_replica(keys, drop="a") == ["done", "done", "last"]
    assert client.change_replica(keys[:1], drop="a") == ["unchanged"]
    cluster.settle()
    assert holders(client, keys) == [{"b"}, {"b"}, {"a"}]
    assert client.get(keys) == data
    with b.node.lease(keys) as lease:
        assert len(lease.crcs(0)) == 4, "parts are kept"
        assert client.change_replica(keys[2:], add="b") == ["no_room"]
    with pytest.raises(NotFoundError, match="'c'"):
        client.change_replica(keys, add="c")
    for wrong in ({}, {"num": 1, "add": "a"}, {"num": 0}):
        with pytest.raises(InvalidError):
            client.change_replica(keys, **wrong)


def test_a_number_of_replicas_on_hosts_of_their_own(cluster):
    a = cluster.node("a", host_id="one")
    cluster.node("near", host_id="one", num_slots=50)
    cluster.node("far", host_id="two", num_slots=4)
    keys, data = blocks(3)
    cluster.client(a).put(keys, data, PART)
    cluster.settle()
    client = cluster.client()
    assert client.change_replica(keys, num=2) == ["done"] * 3
    cluster.settle()
    assert holders(client, keys) == [{"a", "far"}] * 3, "the other host first, though it has less room"
    assert client.change_replica(keys, num=3) == ["done"] * 3
    assert client.change_replica(keys, num=4) == ["no_room"] * 3
    assert client.change_replica(keys, num=1) == ["done"] * 3
    assert client.change_replica(keys, num=1) == ["unchanged"] * 3
    cluster.settle()
    assert [len(some) for some in holders(client, keys)] == [1, 1, 1]
    assert client.get(keys) == data


def test_too_large_for_the_other_node_and_a_holder_that_is_gone(cluster):
    a = cluster.node("a")
    small = cluster.node("small", slot_nbytes=500)
    keys, data = blocks(2)
    cluster.client(a).put(keys, data, PART)
    cluster.settle()
    client = cluster.client()
    assert client.change_replica(keys, add="small") == ["too_large"] * 2
    a.server.close()  # it still announces that it lives
    assert client.change_replica(keys, add="small") == ["failed"] * 2
    assert client.change_replica(keys, drop="a") == ["last"] * 2
    assert small.node.stats()["free"] == small.node.stats()["slots"]


def test_a_replica_on_ssd_is_copied_and_dropped_first(cluster, tmp_path):
    a, b = cluster.node("a", num_slots=2, ssd=tmp_path / "ssd"), cluster.node("b")
    home = cluster.client(a)
    keys, data = blocks(6)
    for key, value in zip(keys, data, strict=True):
        home.put([key], [value], PART)
        assert a.node.spill(20)
    cluster.settle()
    client = cluster.client()
    assert client.replica.replicas(keys[:1]) == [{"a": "ssd"}]
    assert client.change_replica(keys[:1], num=2) == ["done"]
    for key, value in zip(keys[1:], data[1:], strict=True):
        assert client.get([key]) == [value]
    cluster.settle()
    assert client.replica.replicas(keys[:1]) == [{"a": "ssd", "b": "dram"}]
    assert client.change_replica(keys[:1], num=1) == ["done"]
    assert (a.node.exists(keys[:1]), b.node.exists(keys[:1])) == ([False], [True])


def test_a_draining_node_gives_its_objects_away_and_takes_nothing(cluster, tmp_path, eventually):
    a = cluster.node("a", num_slots=4, ssd=tmp_path / "ssd")
    cluster.node("b", num_slots=20)
    keys, data = blocks(12)
    home = cluster.client(a)
    for start in range(0, 12, 2):
        home.put(keys[start : start + 2], data[start : start + 2], PART)
        assert a.node.spill(20)
    cluster.settle()
    client = cluster.client()
    assert client.change_replica(keys[:3], add="b") == ["done"] * 3
    cluster.settle()
    seen: list[int] = []
    report = client.replicas.drain("a", seen.append)
    assert (report.num_keys, report.num_done, report.failures) == (9, 9, {})
    assert sum(seen) == 9
    more, values = blocks(2, seed=2)
    assert home.put(more, values) == ["no_room"] * 2
    assert client.put(more, values) == ["stored"] * 2
    eventually(
        lambda: [load.info.name for load in cluster.directory._state.nodes() if load.is_draining] == ["a"]
    )
    cluster.stop(a)
    eventually(lambda: client.replica.node("a") is None)
    assert client.get(keys) == data


def test_a_drained_node_can_be_taken_back(cluster):
    a = cluster.node("a")
    client = cluster.client()
    keys, data = blocks(2)
    home = cluster.client(a)
    client.replicas.drain("a")
    assert home.put(keys, data) == ["no_room"] * 2
    client.replicas.undrain("a")
    assert home.put(keys, data) == ["stored"] * 2
    assert a.node.stats()["is_draining"] == 0


def test_what_a_lost_node_held_is_repaired_when_asked(cluster, eventually):
    a, b = cluster.node("a", num_slots=20), cluster.node("b", num_slots=20)
    cluster.node("c", num_slots=20)
    keys, data = blocks(10)
    cluster.client(a).put(keys, data, PART)
    cluster.settle()
    client = cluster.client()
    client.change_replica(keys, add="b")
    cluster.settle()
    cluster.stop(a)
    eventually(lambda: client.replica.node("a") is None)
    assert client.replicas.repair(2).num_keys == 10
    cluster.settle()
    assert holders(client, keys) == [{"b", "c"}] * 10
    assert client.replicas.repair(2).num_keys == 0
    cluster.stop(b)
    assert client.get(keys) == data

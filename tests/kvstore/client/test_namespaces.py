"""Namespaces: everything that was put under one can be removed together, wherever it went."""

from __future__ import annotations

import random

import pytest

from kvstore import Client
from kvstore import messages as m
from kvstore.errors import InvalidError
from kvstore.rpc import Empty, Stub


def test_a_namespace_is_dropped_from_every_node_and_tier(cluster, tmp_path):
    rng = random.Random(4)
    keys, data = [rng.randbytes(16) for _ in range(12)], [rng.randbytes(900) for _ in range(12)]
    a, b = cluster.node("a", num_slots=4, ssd=tmp_path / "ssd"), cluster.node("b", num_slots=20)
    clients = [
        Client(cluster.address, engine=store.engine, home=store.node, namespace=name)
        for name, store in (("old", a), ("new", a), ("old", b))
    ]
    for client, some in zip(clients, (slice(0, 4), slice(4, 8), slice(8, 12)), strict=True):
        assert client.replica.wait_in_sync(20)
        assert client.put(keys[some], data[some]) == ["stored"] * 4
        a.node.spill(20)
    cluster.settle()
    clients[0].change_replica(keys[4:5], add="b")
    stub = Stub(a.server.address, m.NODE)
    assert stub.stats(Empty()).namespaces == {"old": 4, "new": 4}
    stub.close()
    assert cluster.client().drop_namespace("old") == 8
    assert clients[1].get(keys) == [None] * 4 + data[4:8] + [None] * 4
    cluster.stop(a)
    again = cluster.node("a", num_slots=4, ssd=tmp_path / "ssd")
    assert again.node.exists(keys) == [False] * 4 + [True] * 4 + [False] * 4
    assert cluster.client().drop_namespace("new") == 5, "four of the restarted node's, and the copy on b"
    for client in clients:
        client.close()


def test_names_that_cannot_be(cluster):
    store = cluster.node("a")
    for name in ("a b", "x" * 65, "a/b"):
        with pytest.raises(InvalidError, match="namespace"):
            Client(cluster.address, engine=store.engine, namespace=name)

"""The directory as a service: nodes announce to it, replicas follow it, and both survive its restart."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from kvstore import Directory, DirectoryReplica, Node, NodeConfig, PrefixIndex
from kvstore.errors import ExhaustedError, InvalidError, StaleError
from kvstore.messages import (
    DIRECTORY,
    MAX_BATCH_KEYS,
    Announce,
    LookupRequest,
    NodeBeat,
    NodeInfo,
    WatchRequest,
)
from kvstore.rpc import Empty, Server, Stub
from kvstore.transfer.segment import Peer, Segment

DEADLINE = 20.0


def keys(count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


def put(node: Node, some: list[bytes]) -> None:
    with node.reserve(some, 8, 8) as reservation:
        assert all(reservation.accepted)
        for index in range(len(some)):
            reservation.commit(index)


def fake_info(name: str, epoch: int, num_slots: int = 10) -> NodeInfo:
    segment = Segment(Peer(epoch, "host", []), name, 64 * num_slots)
    return NodeInfo(name, epoch, "127.0.0.1:1", "host", segment, num_slots, 64)


@pytest.fixture
def stub(cluster):
    stub = Stub(cluster.address, DIRECTORY)
    yield stub
    stub.close()


@pytest.fixture
def replica(cluster):
    replica = DirectoryReplica(cluster.address)
    assert replica.wait_in_sync(DEADLINE)
    yield replica
    replica.close()


class Recorder:
    """A listener that keeps an index of its own, as the Conductor does."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.heard: list[tuple[str, str]] = []

    def on_joined(self, info: NodeInfo) -> None:
        self.heard.append(("joined", info.name))
        self.index.bit(info.name)

    def on_added(self, node: str, keys: Sequence[bytes]) -> None:
        self.index.add(node, keys)

    def on_removed(self, node: str, keys: Sequence[bytes]) -> None:
        self.index.remove(node, keys)

    def on_forgotten(self, node: str) -> None:
        self.heard.append(("forgotten", node))
        self.index.forget(node)


def test_a_replica_hears_what_nodes_gain_and_lose(cluster, replica, eventually):
    recorder = Recorder()
    a = cluster.node("a", num_slots=3).node
    some = keys(5)
    put(a, some[:3])
    eventually(lambda: replica.lengths(some) == {"a": 3})
    replica.subscribe(recorder)
    b = cluster.node("b").node
    put(b, some[:2])
    a.remove(some[2:3])
    put(a, some[3:])
    eventually(lambda: replica.holders(some) == [["a", "b"], ["b"], [], ["a"], ["a"]])
    assert replica.lengths(some) == recorder.index.lengths(some) == {"a": 1, "b": 2}
    assert recorder.index.keys("a") == {some[0], *some[3:]}
    assert recorder.heard == [("joined", "a"), ("joined", "b")]
    assert replica.in_sync


def test_a_node_that_leaves_is_forgotten_at_once(cluster, replica, stub, eventually):
    a = cluster.node("a")
    put(a.node, keys(2))
    eventually(lambda: replica.lengths(keys(2)) == {"a": 2})
    a.node.close()
    assert stub.nodes(Empty()).nodes == []
    eventually(lambda: replica.nodes() == [] and replica.holders(keys(2)) == [[], []])


def test_a_silent_node_is_forgotten(replica, stub, eventually):
    stub.register(fake_info("ghost", 7))
    assert stub.announce(Announce("ghost", 7, 1, keys(2), [], 8)).known
    eventually(lambda: replica.lengths(keys(2)) == {"ghost": 2})
    eventually(lambda: replica.nodes() == [])
    assert replica.lengths(keys(2)) == {}
    assert not stub.heartbeat(NodeBeat("ghost", 7, 8)).known


def test_everything_converges_after_a_restart_of_the_directory(cluster, replica, stub, eventually):
    recorder = Recorder()
    replica.subscribe(recorder)
    a, b = cluster.node("a", num_slots=6000, slot_nbytes=64).node, cluster.node("b").node
    some = keys(5000)
    put(a, some)
    put(b, some[:4])
    eventually(lambda: replica.lengths(some) == {"a": 5000, "b": 4})
    cluster.stop_directory()
    eventually(lambda: not replica.in_sync)
    assert replica.lengths(some) == {"a": 5000, "b": 4}
    b.remove(some[3:4])
    cluster.restart_directory()
    eventually(lambda: replica.in_sync and replica.lengths(some) == {"a": 5000, "b": 3})
    assert recorder.index.lengths(some) == {"a": 5000, "b": 3}
    reply = stub.lookup(LookupRequest(some[:4]))
    assert [len(holders) for holders in reply.holders] == [2, 2, 2, 1]


def test_two_nodes_of_one_name_the_later_one_stays(cluster, replica, eventually):
    first = cluster.node("a")
    put(first.node, keys(2))
    eventually(lambda: replica.lengths(keys(2)) == {"a": 2})
    second = cluster.node("a")
    eventually(lambda: [info.epoch for info in replica.nodes()] == [second.node.epoch])
    assert replica.lengths(keys(2)) == {}
    put(second.node, keys(1))
    put(first.node, keys(1, seed=2))
    eventually(lambda: replica.lengths(keys(2)) == {"a": 1})
    first.node.close()
    assert second.node.flush(DEADLINE)
    assert [info.epoch for info in replica.nodes()] == [second.node.epoch]


def test_a_hundred_thousand_keys_arrive_by_stream_and_by_snapshot(eventually):
    many = keys(100_000)
    directory = Directory(node_timeout_seconds=60.0)
    server = Server(directory.handlers(), max_workers=directory.max_workers)
    stub = Stub(server.address, DIRECTORY)
    replicas = [DirectoryReplica(server.address)]
    try:
        assert replicas[0].wait_in_sync(DEADLINE)
        stub.register(fake_info("big", 7, num_slots=len(many)))
        for sequence, start in enumerate(range(0, len(many), MAX_BATCH_KEYS), 1):
            assert stub.announce(
                Announce("big", 7, sequence, many[start : start + MAX_BATCH_KEYS], [], 0)
            ).known
        eventually(lambda: replicas[0].lengths(many) == {"big": 100_000})
        replicas.append(DirectoryReplica(server.address))
        assert replicas[1].wait_in_sync(DEADLINE)
        assert replicas[1].lengths(many) == {"big": 100_000}
    finally:
        for closable in (*replicas, stub, directory, server):
            closable.close()


def test_a_node_that_changes_faster_than_it_is_heard_starts_again(cluster, replica, eventually):
    a = cluster.node("a", num_slots=2).node
    put(a, keys(1))
    eventually(lambda: replica.lengths(keys(1)) == {"a": 1})
    many = keys(1500, seed=2)
    with cluster.directory._changed:  # the directory answers nobody
        for key in many:
            put(a, [key])
    eventually(lambda: replica.holders(many[-2:]) == [["a"], ["a"]])
    assert not any(replica.holders([*keys(1), *many[:-2]]))


def test_a_listener_that_fails_does_not_end_the_stream(cluster, replica, eventually, caplog):
    class Broken(Recorder):
        def on_added(self, node: str, keys: Sequence[bytes]) -> None:
            raise RuntimeError("broken")

    replica.subscribe(Broken())
    put(cluster.node("a").node, keys(2))
    eventually(lambda: replica.lengths(keys(2)) == {"a": 2})
    assert "failed to hear of KeysChanged" in caplog.text


def test_bad_messages_are_refused(stub):
    stub.register(fake_info("a", 7))
    with pytest.raises(InvalidError, match="length"):
        stub.announce(Announce("a", 7, 1, [b"short"], [], 0))
    with pytest.raises(InvalidError, match="length"):
        stub.lookup(LookupRequest(keys(MAX_BATCH_KEYS + 1)))
    with pytest.raises(InvalidError, match="regex"):
        stub.register(fake_info("no spaces", 7))
    stub.register(fake_info("a", 8))
    with pytest.raises(StaleError, match="replaced"):
        stub.register(fake_info("a", 7))


def test_watchers_beyond_the_limit_are_refused(eventually):
    directory = Directory(max_watchers=1)
    server = Server(directory.handlers(), max_workers=directory.max_workers)
    stub = Stub(server.address, DIRECTORY)
    first = stub.watch(WatchRequest(0, 0))
    assert next(iter(first)).snapshot == "last"
    with pytest.raises(ExhaustedError, match="1 watchers"):
        next(iter(stub.watch(WatchRequest(0, 0))))
    first.cancel()

    def freed() -> bool:
        again = stub.watch(WatchRequest(0, 0))
        try:
            return next(iter(again)).snapshot == "last"
        except ExhaustedError:
            return False
        finally:
            again.cancel()

    eventually(freed)
    stub.close()
    directory.close()
    server.close()


def test_a_node_joins_once(cluster):
    node = cluster.node("a").node
    with pytest.raises(InvalidError, match="joined"):
        node.join(cluster.address, "127.0.0.1:1")
    alone = Node(NodeConfig("alone", "h", 64, 64), cluster.engine())
    assert not alone.flush(0.01)
    alone.close()


def test_a_replica_survives_a_message_that_it_cannot_digest(cluster, replica, monkeypatch, eventually):
    apply, failed = replica._state.apply, threading.Event()

    def fails_once(batch):
        if not failed.is_set():
            failed.set()
            raise KeyError("unexpected")
        return apply(batch)

    monkeypatch.setattr(replica._state, "apply", fails_once)
    cluster.node("a")
    eventually(lambda: failed.is_set() and replica.node("a") is not None)

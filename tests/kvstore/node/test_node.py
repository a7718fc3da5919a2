"""A store node: its verbs in process, and its service as another process would call it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest

from kvstore import Node, NodeConfig
from kvstore import messages as m
from kvstore.errors import InvalidError, StaleError, UnavailableError
from kvstore.rpc import Empty, Server, Stub
from kvstore.transfer import READ, WRITE, TransferEngine, TransferRequest

NBYTES, PART = 1000, 400
CONFIG = NodeConfig("n", "host-n", dram_nbytes=4 * 1024, slot_nbytes=1024)
RNG = random.Random(5)


def keys(count: int) -> list[bytes]:
    return [RNG.randbytes(16) for _ in range(count)]


def crcs(data: bytes) -> list[int]:
    return [zlib.crc32(data[start : start + PART]) for start in range(0, len(data), PART)]


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    engine = TransferEngine(host_id="host-n")
    yield engine
    engine.close()


@pytest.fixture
def node(engine: TransferEngine) -> Iterator[Node]:
    node = Node(CONFIG, engine)
    yield node
    node.validate()
    node.close()


@pytest.fixture
def stub(node: Node) -> Iterator[Stub]:
    server = Server(node.handlers())
    stub = Stub(server.address, m.NODE)
    yield stub
    stub.close()
    server.close()


@pytest.fixture
def peer() -> Iterator[TransferEngine]:
    engine = TransferEngine(host_id="elsewhere")
    yield engine
    engine.close()


def put(node: Node, some: list[bytes], data: bytes) -> None:
    with node.reserve(some, len(data), PART) as reservation:
        assert all(reservation.accepted)
        for index in range(len(some)):
            reservation.buffer(index)[:] = data
            reservation.commit(index)


def test_what_is_committed_can_be_leased_and_viewed(node: Node):
    some, data = keys(2), RNG.randbytes(NBYTES)
    with node.reserve(some, NBYTES, PART) as reservation:
        reservation.buffer(0)[:] = data
        assert node.exists(some) == [False, False]
        reservation.commit(0)
    assert node.exists(some) == [True, False]
    with node.lease(some) as lease:
        assert lease.held == [True, False]
        assert bytes(lease.view(0)) == data
        assert list(lease.crcs(0)) == crcs(data)
        assert lease.view(0).readonly
        with pytest.raises(InvalidError, match="not held"):
            lease.view(1)
    assert node.stats()["free"] == 3


def test_closing_a_reservation_frees_what_was_not_committed(node: Node):
    some = keys(3)
    reservation = node.reserve(some, NBYTES, PART)
    reservation.commit(1, [1, 2, 3])
    reservation.close()
    reservation.close()
    assert node.exists(some) == [False, True, False]
    assert node.stats()["free"] == 3
    with pytest.raises(StaleError, match="not under write"):
        reservation.commit(0, [1, 2, 3])


def test_refusals_say_why(node: Node):
    some = keys(5)
    put(node, some[:1], b"x" * NBYTES)
    lease = node.lease(some[:1])
    with node.reserve(some, NBYTES, PART) as reservation:
        assert reservation.reasons == ["present", "", "", "", "no_room"]
        with node.reserve(some[1:2], NBYTES, PART) as second:
            assert second.reasons == ["writing"]
            with pytest.raises(InvalidError, match="refused: writing"):
                second.buffer(0)
    assert node.reserve(some, 1025, PART).reasons == ["too_large"] * 5
    lease.close()


def test_malformed_calls_are_refused(node: Node):
    with pytest.raises(InvalidError, match="16 bytes"):
        node.reserve([b"short"], NBYTES, PART)
    with pytest.raises(InvalidError, match="parts"):
        node.reserve(keys(1), 1000, 1)
    with pytest.raises(InvalidError, match="parts"):
        node.reserve(keys(1), 0, PART)
    with node.reserve(keys(1), NBYTES, PART) as reservation, pytest.raises(InvalidError, match="2 crcs"):
        reservation.commit(0, [1, 2])
    with pytest.raises(InvalidError, match="node name"):
        NodeConfig("a/b", "h", 1024, 1024)
    with pytest.raises(InvalidError, match="do not hold one slot"):
        NodeConfig("a", "h", 1000, 1024)


def test_least_recently_used_goes_first(node: Node):
    some = keys(4)
    for key in some:
        put(node, [key], b"x" * NBYTES)
    node.lease(some[:1]).close()
    node.exists(some[1:2] * 100)
    put(node, keys(1), b"y" * NBYTES)
    assert node.exists(some) == [True, False, True, True]
    assert node.stats()["evicted"] == 1


def test_a_closed_node_says_so(engine: TransferEngine):
    node = Node(CONFIG, engine)
    put(node, keys(1), b"x" * NBYTES)
    reservation, lease = node.reserve(keys(1), NBYTES, PART), node.lease(keys(1))
    node.close()
    node.close()
    for call in (lambda: node.exists(keys(1)), lambda: reservation.buffer(0), lambda: node.stats()):
        with pytest.raises(UnavailableError, match="closed"):
            call()
    reservation.close()
    lease.close()


def remote_put(
    node: Node, stub: Stub, peer: TransferEngine, some: list[bytes], data: bytes, sums: list[int]
) -> list[bool]:
    reply = stub.reserve(m.NodeReserve(node.epoch, some, len(data), PART))
    for item in reply.items:
        assert item.refusal == ""
    peer.transfer(
        [
            TransferRequest(WRITE, memoryview(data), node.segment, item.offset, reply.handle)
            for item in reply.items
        ]
    )
    items = [m.CommitItem(index, sums) for index in range(len(some))]
    return stub.commit(m.CommitRequest(node.epoch, reply.handle, items)).flags


def test_remote_put_and_lease(node: Node, stub: Stub, peer: TransferEngine):
    some, data = keys(2), RNG.randbytes(NBYTES)
    assert remote_put(node, stub, peer, some, data, crcs(data)) == [True, True]
    reply = stub.lease(m.NodeKeys(node.epoch, [*some, *keys(1)]))
    assert [held is not None for held in reply.held] == [True, True, False]
    for held in reply.held[:2]:
        into = bytearray(NBYTES)
        peer.transfer([TransferRequest(READ, memoryview(into), node.segment, held.offset)])
        assert bytes(into) == data
        assert held.crcs == crcs(data)
    assert node.stats()["leases"] == 1
    stub.release(m.HandleRequest(node.epoch, reply.handle))
    stub.release(m.HandleRequest(node.epoch, reply.handle))
    assert node.stats()["leases"] == 0


def test_a_torn_write_never_becomes_visible(node: Node, stub: Stub, peer: TransferEngine):
    some, data = keys(1), RNG.randbytes(NBYTES)
    torn = [*crcs(data)[:2], 12345]
    assert remote_put(node, stub, peer, some, data, torn) == [False]
    assert node.exists(some) == [False]
    stats = node.stats()
    assert (stats["corrupt"], stats["reserved"], stats["free"]) == (1, 0, 4)


def test_every_remote_call_checks_the_epoch(node: Node, stub: Stub):
    old, some = node.epoch ^ 1, keys(1)
    calls = {
        "reserve": m.NodeReserve(old, some, NBYTES, PART),
        "commit": m.CommitRequest(old, 1, []),
        "abort": m.HandleRequest(old, 1),
        "release": m.HandleRequest(old, 1),
        "drain": m.NodeDrain(old, True),
        "drop_namespace": m.NodeNamespace(old, "x"),
        **{name: m.NodeKeys(old, some) for name in ("lease", "exists", "remove", "check")},
    }
    for name, request in calls.items():
        with pytest.raises(StaleError, match="epoch"):
            getattr(stub, name)(request)
    assert set(calls) | {"stats"} == set(m.NODE.methods)
    assert stub.stats(Empty()).stats == node.stats()


def test_malformed_messages_never_reach_the_node(node: Node, stub: Stub):
    with pytest.raises(InvalidError, match="length"):
        stub.exists(m.NodeKeys(node.epoch, [b"short"]))
    with pytest.raises(InvalidError, match="length"):
        stub.exists(m.NodeKeys(node.epoch, keys(m.MAX_BATCH_KEYS + 1)))
    with pytest.raises(InvalidError):
        stub.reserve(m.NodeReserve(node.epoch, keys(1), 0, PART))
    with pytest.raises(InvalidError, match="twice"):
        stub.commit(m.CommitRequest(node.epoch, 1, [m.CommitItem(0, []), m.CommitItem(0, [])]))
    assert node.stats()["free"] == 4


def test_damage_in_memory_is_found_and_removed(node: Node, stub: Stub):
    some = keys(3)
    put(node, some[:2], RNG.randbytes(NBYTES))
    with node.lease(some[:1]) as lease:
        offset = lease.offset(0)
        lease.crcs(0)  # else they are computed in the background, of damaged bytes
    memory = memoryview(node._buffer.array)
    memory[offset + 999] ^= 1
    memory.release()
    assert stub.check(m.NodeKeys(node.epoch, some)).flags == [False, True, False]
    assert node.exists(some) == [False, True, False]
    assert node.stats()["corrupt"] == 1

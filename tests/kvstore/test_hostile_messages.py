"""Bytes that no client of ours would send, on the ports of a node and of the directory: an error, and nothing else."""

from __future__ import annotations

import random

import grpc
import msgspec
import pytest
from fakes.stores import Cluster

from kvstore import messages as m
from kvstore.rpc import Empty, Service

NBYTES = 600
CALLER_IS_WRONG = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
KEYS = [bytes([number]) * 16 for number in range(3)]


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


def good_requests(epoch: int, info: m.NodeInfo) -> list[tuple[Service, str, msgspec.Struct]]:
    """One of every call; those that change anything name a node, a handle or keys that there are not."""
    new = [bytes([number]) * 16 for number in range(100, 103)]
    stranger = msgspec.structs.replace(info, name="stranger", epoch=5)
    return [
        (m.NODE, "reserve", m.NodeReserve(epoch, new, NBYTES, 100, "ns")),
        (m.NODE, "commit", m.CommitRequest(epoch, 7, [m.CommitItem(0, [1, 2])])),
        (m.NODE, "abort", m.HandleRequest(epoch, 7)),
        (m.NODE, "lease", m.NodeKeys(epoch, [*KEYS, *new])),
        (m.NODE, "release", m.HandleRequest(epoch, 7)),
        (m.NODE, "exists", m.NodeKeys(epoch, KEYS)),
        (m.NODE, "remove", m.NodeKeys(epoch, new)),
        (m.NODE, "check", m.NodeKeys(epoch, KEYS)),
        (m.NODE, "drain", m.NodeDrain(epoch, False)),
        (m.NODE, "drop_namespace", m.NodeNamespace(epoch, "nobodys")),
        (m.NODE, "stats", Empty()),
        (m.DIRECTORY, "register", stranger),
        (m.DIRECTORY, "heartbeat", m.NodeBeat("stranger", 5, 3)),
        (m.DIRECTORY, "announce", m.Announce("stranger", 5, 1, new, [], 3)),
        (m.DIRECTORY, "leave", m.NodeId("stranger", 5)),
        (m.DIRECTORY, "lookup", m.LookupRequest(KEYS)),
        (m.DIRECTORY, "nodes", Empty()),
    ]


def broken(raw: bytes, rng: random.Random) -> bytes:
    """`raw` with some harm done to it: bytes changed, cut off, put in, or fields of other types and sizes."""
    harm = rng.randrange(5)
    if harm == 0:
        return rng.randbytes(rng.randrange(60))
    if harm == 1:
        return raw[: rng.randrange(len(raw))]
    if harm == 2:
        at = rng.randrange(len(raw) + 1)
        return raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:]
    if harm == 3:
        some = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            some[rng.randrange(len(some))] ^= 1 << rng.randrange(8)
        return bytes(some)
    fields = msgspec.msgpack.decode(raw)
    if fields:
        odd = (None, -1, 2**63, 2**64 - 1, 1e308, float("nan"), " ", "x" * 999, b"", [], {}, [[[]]], True)
        fields[rng.choice(list(fields))] = rng.choice(odd)
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("seed", [1, 2])
def test_broken_messages_are_refused_and_change_nothing(cluster, seed):
    store = cluster.node("a", num_slots=256, lease_seconds=0.5)
    client = cluster.client(store)
    assert client.put(KEYS, [key * 40 for key in KEYS]) == ["stored"] * 3
    cluster.settle()
    rng = random.Random(seed)
    addresses = {m.NODE.name: store.server.address, m.DIRECTORY.name: cluster.address}
    channels = {name: grpc.insecure_channel(address) for name, address in addresses.items()}
    answered = set()
    info = client.replica.node("a")
    assert info is not None
    for service, call, request in good_requests(store.node.epoch, info):
        encoded = msgspec.msgpack.encode(request)
        ask = channels[service.name].unary_unary(f"/{service.name}/{call}")
        for raw in (encoded, *(broken(encoded, rng) for _ in range(60))):
            try:
                ask(raw, timeout=30)
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            assert code in CALLER_IS_WRONG, (service.name, call, raw)
            answered.add(code)
        store.node.validate()
    assert len(answered) > 2
    for channel in channels.values():
        channel.close()
    assert store.node.exists(KEYS) == [True] * 3
    assert client.get(KEYS) == [key * 40 for key in KEYS]
    assert cluster.client().get(KEYS) == [key * 40 for key in KEYS]
    client.replicas.undrain("a")  # which a changed bit may well have asked for
    assert client.put([b"n" * 16], [b"more"]) == ["stored"]

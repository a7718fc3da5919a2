"""A client's connections to nodes: one each, for as long as the directory knows the node."""

from __future__ import annotations

import pytest

from kvstore.client.peers import Peers
from kvstore.errors import UnavailableError
from kvstore.messages import NodeInfo, NodeKeys
from kvstore.transfer import Peer, Segment


def info(name: str, port: int = 1) -> NodeInfo:
    return NodeInfo(name, 5, f"127.0.0.1:{port}", "host", Segment(Peer(1, "host", []), "m", 100), 1, 100)


@pytest.fixture
def peers():
    peers = Peers(1.0)
    yield peers
    peers.close()


def test_a_node_keeps_its_stub_until_its_address_changes_or_it_is_forgotten(peers: Peers):
    first = peers.stub(info("a"))
    assert peers.stub(info("a")) is first
    moved = peers.stub(info("a", port=2))
    assert moved is not first
    peers.on_forgotten("a")
    peers.on_forgotten("a")
    assert peers.stub(info("a", port=2)) not in (first, moved)


def test_stubs_of_nodes_that_come_and_go_do_not_pile_up(peers: Peers):
    stubs = []
    for number in range(30):
        stubs.append(peers.stub(info(f"n{number}")))
        peers.on_forgotten(f"n{number}")
    assert not peers._stubs
    for stub in stubs[:22]:
        with pytest.raises(UnavailableError, match="closed"):
            stub.exists(NodeKeys(5, []))


def test_a_node_that_did_not_answer_is_asked_again_when_it_comes_back(peers: Peers):
    def call(node: NodeInfo, indices: list[int]) -> None:
        raise UnavailableError("nobody there")

    assert peers.each([(info("a"), [3])], call) == [([3], None)]
    assert peers.is_suspect("a")
    peers.on_forgotten("a")
    assert not peers.is_suspect("a")


def test_a_client_drops_the_stub_of_a_node_that_left(cluster, eventually):
    a, b = cluster.node("a"), cluster.node("b")
    client = cluster.client()
    assert client.exists([b"k" * 16], fresh=True) == [False]
    assert set(client._peers._stubs) == {"a", "b"}
    a.node.close()
    eventually(lambda: set(client._peers._stubs) == {"b"})
    assert b.node.exists([b"k" * 16]) == [False]

"""Rails near the memory at both ends are taken first."""

import numpy as np
import pytest

from kvstore.transfer import READ, Peer, Segment, Topology, TransferRequest
from kvstore.transfer.registry import Registry
from kvstore.transfer.segment import DEFAULT_LOCATION
from kvstore.transfer.transport.affinity import Affinity


@pytest.fixture
def near_and_far(make_engine, make_relay):
    """A peer whose second rail is farther from its memory "cpu:0", and its first from "cpu:1"."""
    owner = make_engine("far")
    (address,) = owner.peer.rails
    relays = [make_relay(address, f"127.0.0.{2 + i}") for i in range(2)]
    peer = Peer(
        owner.peer.epoch, "far", [relay.address for relay in relays], {"cpu:0": [0, 1], "cpu:1": [1, 0]}
    )
    segments = {}
    for location in ("cpu:0", "cpu:1"):
        owner.register_local_memory(bytes(1 << 22), location, name=location)
        segments[location] = Segment(peer, location, 1 << 22, location)
    return relays, segments


def read(engine, segment):
    sink = memoryview(bytearray(1 << 22))
    engine.transfer([TransferRequest(READ, sink, segment, 0)])


def moved(engine):
    return [rail.nbytes >> 20 for rail in engine.rails()]


def test_the_rail_near_the_remote_memory_is_taken_the_other_one_when_it_has_failed(near_and_far, make_engine):
    relays, segments = near_and_far
    engine = make_engine("here", topology=Topology({"cpu:0": ([], [])}), stall_seconds=60)
    read(engine, segments["cpu:0"])
    assert moved(engine) == [4, 0]
    read(engine, segments["cpu:1"])
    assert moved(engine) == [4, 4]
    relays[0].cut()
    read(engine, segments["cpu:0"])
    assert moved(engine) == [4, 8]


def test_without_a_topology_all_rails_are_near(near_and_far, make_engine):
    _, segments = near_and_far
    engine = make_engine("here")
    read(engine, segments["cpu:0"])
    assert min(moved(engine)) > 0


def test_the_own_nic_on_the_way_counts_as_well(make_engine):
    owner = make_engine("far", rails=["127.0.0.1", "127.0.0.2"])
    affinity = Affinity(Topology({"cpu:0": (["lo"], []), "cpu:1": (["eth9"], ["lo"])}))
    assert affinity.tiers_of_addresses(["127.0.0.1", "192.0.2.77"]) == {"cpu:0": [0, 0], "cpu:1": [1, 0]}
    ways = affinity.ways(owner.peer)
    assert ways == ["lo", "lo"]
    assert affinity.ranks(ways, {}, "cpu:0", "cpu:0") == [0, 0]
    assert affinity.ranks(ways, {"cpu:0": [2, 0]}, "cpu:1", "cpu:0") == [3, 1]
    assert affinity.ranks(ways, {"cpu:0": [1]}, "cpu:0", "cpu:0") == [1, 0]  # a peer that says too little


def test_memory_has_the_location_it_was_registered_with():
    registry, memory = Registry(Peer(1, "here", [])), np.zeros(100, np.uint8)
    registry.add(memory, "cpu:1", "mine", "")
    assert registry.location_of(memoryview(memory)[50:60]) == "cpu:1"
    assert registry.location_of(memoryview(memory)[99:]) == "cpu:1"
    assert registry.location_of(memoryview(np.zeros(10, np.uint8))) == DEFAULT_LOCATION
    assert registry.location_of(memoryview(b"")) == DEFAULT_LOCATION

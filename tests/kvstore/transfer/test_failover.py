"""Rails that are cut, frozen and restored under transfers (case 50): nothing is lost, nothing arrives late."""

import math
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.transfer import READ, WRITE, Peer, Segment, TransferError, TransferRequest
from kvstore.transfer.transport import endpoint

MIB = 1 << 20
NBYTES = 32 * MIB


class Railed:
    """An engine, and a peer that it reaches over relays, one a rail."""

    def __init__(self, make_engine, make_relay, num_rails, nbytes=NBYTES, **engine_arguments):
        self.owner = make_engine("far")
        self.memory = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)
        direct = self.owner.register_local_memory(self.memory, name="m")
        (address,) = self.owner.peer.rails
        hosts = [f"127.0.0.{2 + i}" for i in range(num_rails)]
        self.relays = [make_relay(address, host) for host in hosts]
        peer = Peer(direct.peer.epoch, "far", [relay.address for relay in self.relays])
        self.segment = Segment(peer, "m", nbytes)
        self.engine = make_engine("here", timeout_seconds=120, **engine_arguments)

    def requests(self, opcode, local, piece):
        return [
            TransferRequest(opcode, memoryview(local)[at : at + piece], self.segment, at)
            for at in range(0, len(local), piece)
        ]

    def moved(self):
        return [rail.nbytes for rail in self.engine.rails()]

    def usable(self):
        return [rail.is_usable for rail in self.engine.rails()]

    def move_until(self, condition, nbytes=MIB):
        """Small reads, until a rail is found well again, for example: that takes traffic."""
        deadline, sink = time.monotonic() + 60, bytearray(nbytes)
        while not condition():
            assert time.monotonic() < deadline
            self.engine.transfer(self.requests(READ, sink, nbytes))
            threading.Event().wait(0.01)


@pytest.fixture
def railed(make_engine, make_relay):
    return lambda num_rails, **kwargs: Railed(make_engine, make_relay, num_rails, **kwargs)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_batch_uses_every_rail(railed, opcode):
    system = railed(3)
    local = np.zeros(NBYTES, np.uint8) if opcode is READ else np.full(NBYTES, 7, np.uint8)
    system.engine.transfer(system.requests(opcode, local, 16 * MIB))
    np.testing.assert_array_equal(local, system.memory)
    assert sum(system.moved()) == NBYTES
    assert min(system.moved()) > NBYTES // 20
    assert [relay.nbytes > NBYTES // 20 for relay in system.relays] == [True] * 3


@pytest.mark.parametrize("fault", ["cut", "freeze"])
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_rail_that_fails_under_a_batch_is_left_and_used_again_later_then_the_other_one_fails(
    railed, opcode, fault, monkeypatch
):
    monkeypatch.setattr("kvstore.transfer.rails.COOLDOWN_SECONDS", 0.2)
    system = railed(2)
    expected = system.memory.copy() if opcode is READ else np.full(NBYTES, 7, np.uint8)
    for broken in (0, 1):
        local = np.zeros(NBYTES, np.uint8) if opcode is READ else expected.copy()
        engine, relay = system.engine, system.relays[broken]
        before = relay.nbytes
        batch = engine.allocate_batch_id(8)
        engine.submit_transfer(batch, system.requests(opcode, local, NBYTES // 8))
        while relay.nbytes < before + 2 * MIB:
            threading.Event().wait(0.001)
        getattr(relay, fault)()
        statuses = engine.wait(batch, 100)
        assert {status.state for status in statuses} == {"COMPLETED"}
        assert sum(status.num_resubmitted for status in statuses) > 0
        np.testing.assert_array_equal(local if opcode is READ else system.memory, expected)
        engine.free_batch_id(batch)
        assert system.usable()[broken] is False
        relay.restore() if fault == "cut" else relay.thaw()
        system.move_until(lambda broken=broken: system.usable()[broken])
        before = system.moved()[broken]
        system.move_until(lambda b=broken, before=before: system.moved()[b] > before, 16 * MIB)
    assert engine.counters()["failed"] == 0
    assert engine.counters()["resubmitted"] > 0


def test_what_a_frozen_rail_held_back_does_not_arrive_in_the_buffer_later(railed):
    """Its connection is closed before the bytes are asked for on another rail."""
    system = railed(2, nbytes=8 * MIB)
    sink = np.zeros(8 * MIB, np.uint8)
    system.engine.transfer(system.requests(READ, sink, 8 * MIB))
    system.relays[0].freeze()
    system.engine.transfer(system.requests(READ, sink, 8 * MIB))
    np.testing.assert_array_equal(sink, system.memory)
    sink[:] = 5
    system.relays[0].thaw()
    system.move_until(lambda: all(system.usable()))
    assert (sink == 5).all()


class Doorman:
    """Admits every write, and counts those that are arriving."""

    def __init__(self):
        self.inside, self.most = 0, 0
        self.lock = threading.Lock()

    @contextmanager
    def admit(self, permit, offsets, lengths):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            yield math.inf
        finally:
            with self.lock:
                self.inside -= 1


def test_a_write_that_changes_rails_leaves_no_copy_behind_at_the_owner(railed):
    """Else the frozen copy would keep its permit, and the slot, for as long as the writer had."""
    system = railed(2, nbytes=MIB, connections_per_peer=1)
    doorman, memory = Doorman(), np.zeros(8 * MIB, np.uint8)
    system.owner.register_local_memory(memory, name="guarded", guard=doorman)
    segment = Segment(system.segment.peer, "guarded", 8 * MIB, guarded=True)
    engine, source = system.engine, np.full(8 * MIB, 7, np.uint8)
    system.relays[1].freeze()
    batch = engine.allocate_batch_id(1)
    engine.submit_transfer(batch, [TransferRequest(WRITE, memoryview(source), segment, 0)])
    while system.relays[0].nbytes < 2 * MIB:
        threading.Event().wait(0.001)
    system.relays[0].freeze()
    system.relays[1].thaw()
    (status,) = engine.wait(batch, 100)
    assert (status.state, doorman.inside) == ("COMPLETED", 0)
    assert (memory == 7).all()
    engine.free_batch_id(batch)


def test_rails_that_nobody_answers_on_fail_one_after_the_other_and_then_the_request(railed):
    system = railed(3, nbytes=MIB)
    for relay in system.relays:
        relay.cut()
    for _ in range(2):
        with pytest.raises(TransferError, match="Connection refused"):
            system.engine.transfer(system.requests(READ, bytearray(MIB), MIB))
    assert system.usable() == [False] * 3
    assert system.engine.counters()["resubmitted"] == 4  # two of three attempts, twice
    for relay in system.relays:
        relay.restore()
    sink = bytearray(MIB)
    system.engine.transfer(system.requests(READ, sink, MIB))
    assert sink == system.memory.tobytes()


def test_a_peer_all_of_whose_rails_freeze_times_out_and_recovers(railed, monkeypatch):
    monkeypatch.setattr("kvstore.transfer.rails.COOLDOWN_SECONDS", 0.2)
    system = railed(2, nbytes=MIB, stall_seconds=0.05)
    sink = bytearray(MIB)
    system.engine.transfer(system.requests(READ, sink, MIB))
    for relay in system.relays:
        relay.freeze()
    sink[:] = bytes(MIB)
    batch = system.engine.allocate_batch_id(1)
    system.engine.submit_transfer(batch, system.requests(READ, sink, MIB), timeout_seconds=1.0)
    (status,) = system.engine.wait(batch, 60)
    assert status.state == "TIMEOUT"
    kept = bytes(sink)
    for relay in system.relays:
        relay.thaw()
    other = bytearray(MIB)
    system.engine.transfer(system.requests(READ, other, MIB))
    assert other == system.memory.tobytes()
    assert sink == kept
    system.engine.free_batch_id(batch)


def test_a_lone_rail_is_given_all_the_time_of_the_transfer(railed):
    system = railed(1, nbytes=MIB, stall_seconds=0.05)
    system.relays[0].freeze()
    batch = system.engine.allocate_batch_id(1)
    sink = bytearray(MIB)
    system.engine.submit_transfer(batch, system.requests(READ, sink, MIB))
    (status,) = system.engine.wait(batch, 1.0)
    assert status.state == "PENDING"
    system.relays[0].thaw()
    (status,) = system.engine.wait(batch, 60)
    assert (status.state, status.num_resubmitted) == ("COMPLETED", 0)
    assert sink == system.memory.tobytes()
    system.engine.free_batch_id(batch)


def test_a_refusal_by_the_owner_is_not_tried_on_another_rail(railed):
    system = railed(2, nbytes=MIB, stall_seconds=60)
    unknown = Segment(system.segment.peer, "unknown", MIB)
    with pytest.raises(TransferError, match="'unknown' is not registered"):
        system.engine.transfer([TransferRequest(READ, memoryview(bytearray(10)), unknown, 0)])
    assert system.engine.counters()["resubmitted"] == 0
    assert system.usable() == [True, True]


def test_a_link_error_removes_the_connection_on_both_sides(railed):
    system = railed(1, nbytes=MIB)
    sink = bytearray(MIB)
    system.engine.transfer(system.requests(READ, sink, MIB))
    assert num_serving() == 1
    system.relays[0].cut()
    deadline = time.monotonic() + 30
    while num_serving():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    system.relays[0].restore()
    system.engine.transfer(system.requests(READ, sink, MIB))
    assert num_serving() == 1


def num_serving():
    return sum(thread.name == "transfer-serve" for thread in threading.enumerate())


def test_an_idle_lane_leaves_and_a_frame_brings_it_back(railed, monkeypatch):
    monkeypatch.setattr(endpoint, "IDLE_SECONDS", 0.05)
    system = railed(2, nbytes=MIB)
    for _ in range(3):
        system.engine.transfer(system.requests(READ, bytearray(MIB), MIB))
        deadline = time.monotonic() + 30
        while num_serving():
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)


def test_an_engine_serves_on_several_rails_of_both_families(make_engine):
    owner, engine = make_engine("far", rails=["127.0.0.1", "127.0.0.2", "::1"]), make_engine("here")
    memory = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
    segment = owner.register_local_memory(memory, name="m")
    assert [host for host, _ in owner.peer.rails] == ["127.0.0.1", "127.0.0.2", "::1"]
    sink = np.zeros(NBYTES, np.uint8)
    engine.transfer([TransferRequest(READ, memoryview(sink), segment, 0)])
    np.testing.assert_array_equal(sink, memory)
    assert all(rail.nbytes for rail in engine.rails())


def test_an_address_that_cannot_be_bound_closes_those_that_were(make_engine):
    with pytest.raises(OSError, match="assign"):
        make_engine(rails=["127.0.0.1", "192.0.2.1"])

"""Guarded memory: its owner admits every write, holds it while the bytes arrive, and cuts off what is late."""

import math
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.transfer import READ, WRITE, TransferError, TransferRequest
from kvstore.transfer.transport import wire


class Doorman:
    """Admits writes with `permit` until `until`; `inside` tells how many are moving."""

    def __init__(self, permit, until=math.inf):
        self.permit, self.until = permit, until
        self.inside = 0
        self.asked = []
        self.changed = threading.Condition()

    @contextmanager
    def admit(self, permit, offsets, lengths):
        with self.changed:
            self.asked.append((permit, list(zip(offsets.tolist(), lengths.tolist(), strict=True))))
            if permit != self.permit:
                raise TransferError(f"permit {permit} is over")
            self._enter(1)
        try:
            yield self.until
        finally:
            with self.changed:
                self._enter(-1)

    def _enter(self, step):
        self.inside += step
        self.changed.notify_all()

    def wait_inside(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.inside == count, 30)


@pytest.fixture
def guarded(make_engine, make_shared):
    """`guarded(doorman)`: the engine, segment and memory (zeros) of an owner on host "a"."""

    def make(doorman, nbytes=100):
        owner, shared = make_engine("a"), make_shared("guarded", nbytes)
        segment = owner.register_local_memory(shared.array, name="m", shm_path=shared.path, guard=doorman)
        return owner, segment, shared.array

    return make


def write(segment, offset, data, permit=0):
    return TransferRequest(WRITE, memoryview(data), segment, offset, permit)


@pytest.mark.parametrize("where", ["own engine", "same host", "elsewhere"])
def test_a_write_needs_its_permit_wherever_it_comes_from(make_engine, guarded, where):
    doorman = Doorman(permit=7)
    owner, segment, memory = guarded(doorman)
    engine = owner if where == "own engine" else make_engine("a" if where == "same host" else "b")
    engine.transfer([write(segment, 10, b"right", 7), write(segment, 20, b"too", 7)])
    assert doorman.asked == [(7, [(10, 5), (20, 3)])]
    for permit in (0, 6, 2**63 - 1):
        with pytest.raises(TransferError, match=f"permit {permit} is over"):
            engine.transfer([write(segment, 10, b"WRONG", permit)])
    sink = bytearray(13)
    engine.transfer([TransferRequest(READ, memoryview(sink), segment, 10)])
    assert sink == b"right\0\0\0\0\0too"
    assert doorman.inside == 0
    writes = "loopback_write" if where == "own engine" else "tcp_write"
    reads = {"own engine": "loopback_read", "same host": "shm_read", "elsewhere": "tcp_read"}[where]
    counters = engine.counters()
    assert (counters[writes], counters[reads], counters["shm_write"]) == (8, 13, 0)
    assert bytes(memory[10:23]) == sink


def test_requests_of_one_submit_keep_their_own_permits(make_engine, guarded):
    doorman = Doorman(permit=1)
    _, segment, memory = guarded(doorman)
    engine = make_engine("b")
    batch = engine.allocate_batch_id(4)
    engine.submit_transfer(
        batch, [write(segment, 10 * i, b"x", permit) for i, permit in enumerate((1, 2, 1, 2))]
    )
    assert [status.state for status in engine.wait(batch, 60)] == ["COMPLETED", "FAILED"] * 2
    assert np.flatnonzero(memory).tolist() == [0, 20]
    engine.free_batch_id(batch)


@pytest.mark.parametrize("permit", [-1, 2**63])
def test_a_permit_that_does_not_fit_is_refused_at_once(make_engine, guarded, permit):
    _, segment, _ = guarded(Doorman(permit=1))
    with pytest.raises(ValueError, match="request 0: permit"):
        make_engine("b").transfer([write(segment, 0, b"x", permit)])


@pytest.fixture
def half_sent(guarded):
    """Half of a write of 80 bytes has arrived: the socket, and the memory. The rest is for the test to send."""
    sockets = []

    def send(doorman):
        owner, _, memory = guarded(doorman)
        sock = socket.create_connection(owner.peer.rails[0], timeout=30)
        sockets.append(sock)
        sock.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, 0, 0, 5, owner.peer.epoch))
        sock.recv(wire.HELLO.size, socket.MSG_WAITALL)
        frame = wire.pack_frame(WRITE, "m", np.array([0]), np.array([80]), 80, 30.0, doorman.permit)
        sock.sendall(frame + b"x" * 40)
        return sock, memory

    yield send
    for sock in sockets:
        sock.close()


def test_the_guard_is_held_for_as_long_as_bytes_arrive(half_sent):
    doorman = Doorman(permit=7)
    sock, memory = half_sent(doorman)
    doorman.wait_inside(1)
    sock.sendall(b"y" * 40)
    doorman.wait_inside(0)
    assert sock.recv(wire.ANSWER.size, socket.MSG_WAITALL) == wire.ANSWER.pack(wire.ANSWER_MAGIC, wire.OK, 0)
    assert bytes(memory[:81]) == b"x" * 40 + b"y" * 40 + b"\0"


def test_a_write_that_outstays_its_permit_is_cut_off(half_sent):
    doorman = Doorman(permit=7, until=time.monotonic() + 0.2)
    sock, memory = half_sent(doorman)
    assert sock.recv(1) == b""  # cut, though the sender said that it may take 30 s
    doorman.wait_inside(0)
    assert time.monotonic() >= doorman.until
    assert not memory[40:].any()


def test_a_write_whose_sender_leaves_lets_go_of_the_guard(half_sent):
    doorman = Doorman(permit=7)
    sock, _ = half_sent(doorman)
    doorman.wait_inside(1)
    sock.close()
    doorman.wait_inside(0)

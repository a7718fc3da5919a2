"""Peers in other processes that freeze, die or starve: their transfers end in time, others do not suffer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import kvstore
from kvstore.transfer import (
    READ,
    WRITE,
    Faults,
    Segment,
    SharedBuffer,
    TransferError,
    TransferRequest,
    TransferState,
)

COMPLETED, FAILED, TIMEOUT = TransferState.COMPLETED, TransferState.FAILED, TransferState.TIMEOUT
NBYTES = 32 << 20
OWNER = """
import sys, msgspec
from kvstore.transfer import SharedBuffer, TransferEngine
host_id, nbytes = sys.argv[1], int(sys.argv[2])
engine, shared = TransferEngine(host_id=host_id), SharedBuffer("owner", nbytes)
shared.array[:] = 9
segment = engine.register_local_memory(shared.array, name="m", shm_path=shared.path)
print(msgspec.json.encode(segment).decode(), flush=True)
sys.stdin.read()
engine.close()
shared.close()
"""


class Owner:
    """A process that offers `NBYTES` of nines."""

    def __init__(self, host_id="far"):
        root = Path(kvstore.__file__).parents[1]
        command = [sys.executable, "-c", OWNER, host_id, str(NBYTES)]
        self.process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.segment = msgspec.json.decode(self.process.stdout.readline(), type=Segment)

    def signal(self, number):
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate(timeout=60)


@pytest.fixture
def owner(nothing_leaks):
    owner = Owner()
    yield owner
    owner.close()


def status_of(engine, opcode, local, segment, timeout_seconds):
    batch = engine.allocate_batch_id(1)
    engine.submit_transfer(
        batch, [TransferRequest(opcode, memoryview(local), segment, 0)], timeout_seconds=timeout_seconds
    )
    (status,) = engine.wait(batch, 60)
    engine.free_batch_id(batch)
    return status


def test_a_frozen_peer_times_out_alone_and_works_again_when_it_thaws(owner, make_engine):
    healthy = make_engine("healthy")
    memory = np.zeros(NBYTES, np.uint8)
    good = healthy.register_local_memory(memory, name="m")
    engine = make_engine("here", timeout_seconds=60)
    sink = np.zeros(NBYTES, np.uint8)
    assert status_of(engine, READ, sink, owner.segment, 60).state == COMPLETED  # the connections are up
    assert (sink == 9).all()

    owner.signal(signal.SIGSTOP)
    sink[:] = 5
    frozen = engine.allocate_batch_id(40)
    requests = [TransferRequest(READ, memoryview(sink), owner.segment, 0)] * 20
    requests += [TransferRequest(WRITE, memoryview(sink), owner.segment, 0)] * 20
    began = time.monotonic()
    engine.submit_transfer(frozen, requests, timeout_seconds=1.0)
    engine.transfer([TransferRequest(WRITE, memoryview(sink), good, 0)])  # a healthy peer, meanwhile
    assert (memory == 5).all()
    statuses = engine.wait(frozen, 60)
    assert time.monotonic() - began < 20
    assert {status.state for status in statuses} == {TIMEOUT}
    assert {"the peer did not keep up", "its time was over before it started"} <= {
        s.reason.partition(" within")[0] for s in statuses
    }
    engine.free_batch_id(frozen)

    sink[:] = 5
    owner.signal(signal.SIGCONT)
    other = np.zeros(NBYTES, np.uint8)
    assert status_of(engine, READ, other, owner.segment, 60).state == COMPLETED
    assert (sink == 5).all()  # what had timed out never arrives
    assert engine.counters()["failed"] == 40


def test_a_frozen_peer_that_was_never_reached_times_out(owner, make_engine):
    owner.signal(signal.SIGSTOP)
    status = status_of(make_engine(), WRITE, b"hello", owner.segment, 0.5)
    assert (status.state, status.nbytes_done) == (TIMEOUT, 0)
    assert "'far' at 127.0.0.1" in status.reason


def test_a_frozen_peer_on_this_host_is_read_through_shared_memory(make_engine):
    owner = Owner("here")
    try:
        owner.signal(signal.SIGSTOP)
        engine = make_engine("here")
        sink = bytearray(100)
        engine.transfer([TransferRequest(READ, memoryview(sink), owner.segment, NBYTES - 100)])
        assert sink == b"\t" * 100
        assert engine.counters()["shm_read"] == 100
    finally:
        owner.close()


@pytest.mark.parametrize(
    ("host_id", "reason"),
    [("far", "Connection refused|closed the connection|reset"), ("here", "stale segment")],
)
def test_a_killed_peer_fails_and_its_memory_is_swept(make_engine, host_id, reason):
    owner = Owner(host_id)
    try:
        engine = make_engine("here")
        sink = bytearray(10)
        engine.transfer([TransferRequest(READ, memoryview(sink), owner.segment, 0)])
        owner.signal(signal.SIGKILL)
        owner.process.wait(60)
        assert os.path.exists(owner.segment.shm_path)
        sink[:] = bytes(10)
        with pytest.raises(TransferError, match=reason):
            engine.transfer([TransferRequest(READ, memoryview(sink), owner.segment, 0)])
        assert sink == bytes(10)
        SharedBuffer("next", 1).close()
        assert not os.path.exists(owner.segment.shm_path)
        with pytest.raises(TransferError, match=reason):
            engine.transfer([TransferRequest(READ, memoryview(sink), owner.segment, 0)])
    finally:
        owner.close()


def test_a_transfer_that_the_rate_limit_makes_too_slow_times_out(make_pair):
    pair = make_pair("tcp", 10_000_000, rate_limit_nbytes_per_second=1e6, timeout_seconds=60)
    source = np.ones(10_000_000, np.uint8)
    status = status_of(pair.engine, WRITE, source, pair.segment, 0.3)
    assert status.state == TIMEOUT
    assert 0 < pair.memory.sum() < 1_500_000
    assert status_of(pair.engine, WRITE, b"later", pair.segment, 30).state == COMPLETED


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_the_rate_limit_holds_for_the_side_that_sends(make_engine, opcode):
    """2 MB at 10 MB/s take 0.2 s, less the burst of 10 ms; nothing here can make them faster."""
    limited, free = make_engine(rate_limit_nbytes_per_second=10e6), make_engine()
    initiator, owner = (free, limited) if opcode is READ else (limited, free)
    segment = owner.register_local_memory(bytearray(2_000_000), name="m")
    began = time.monotonic()
    initiator.transfer([TransferRequest(opcode, memoryview(bytearray(2_000_000)), segment, 0)])
    assert time.monotonic() - began > 0.18


def test_closing_the_engine_fails_what_is_in_flight(owner, make_engine):
    engine = make_engine(timeout_seconds=3600)
    owner.signal(signal.SIGSTOP)
    batch = engine.allocate_batch_id(5)
    sink = np.zeros(NBYTES, np.uint8)
    engine.submit_transfer(batch, [TransferRequest(READ, memoryview(sink), owner.segment, 0)] * 5)
    assert not any(status.state.is_final for status in engine.wait(batch, 0.05))
    engine.close()
    engine.close()
    assert {(s.state, s.reason) for s in engine.wait(batch)} == {(FAILED, "the engine was closed")}


def test_an_own_deadline_beats_that_of_the_frames_ahead(make_pair):
    """Two workers are held by slow requests with an hour to go; a request behind them has its own time."""
    pair = make_pair("tcp", 10, faults=Faults(delay_seconds=3600))
    batch = pair.engine.allocate_batch_id(2)
    for _ in range(2):
        pair.engine.submit_transfer(
            batch, [TransferRequest(WRITE, memoryview(b"x"), pair.segment, 0)], timeout_seconds=3600
        )
    pair.engine.faults = None
    status = status_of(pair.engine, WRITE, b"y", pair.segment, 0.05)
    assert (status.state, status.reason) == (TIMEOUT, "its time was over before it started")
    assert not any(status.state.is_final for status in pair.engine.wait(batch, 0))

import time

import numpy as np
import pytest

from kvstore.transfer import READ, WRITE, Faults, TransferError, TransferRequest, TransferState

PATHS = ("loopback", "shm", "tcp")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_corrupted_byte_arrives_and_the_source_is_left_alone(make_pair, path, opcode):
    nbytes = 3_000_000  # several frames: the byte lies in one of them
    pair = make_pair(path, nbytes, faults=Faults(corrupt_byte=nbytes + 2_000_001))
    local = np.full(nbytes, 4, np.uint8)
    pair.memory[:] = 3
    source, sink = (pair.memory, local) if opcode is READ else (local, pair.memory)
    pair.engine.transfer([TransferRequest(opcode, memoryview(local), pair.segment, 0)])
    value = 3 if opcode is READ else 4
    assert (source == value).all()
    assert np.flatnonzero(sink != value).tolist() == [2_000_001]
    assert sink[2_000_001] == value ^ 0xFF


@pytest.mark.parametrize("path", PATHS)
def test_a_dead_path_fails_all_and_touches_nothing_until_it_is_revived(make_pair, path):
    pair = make_pair(path, 100, faults=Faults(dead=True))
    sink = bytearray(100)
    pair.memory[:] = 3
    with pytest.raises(TransferError, match=f"injected fault: {path} is dead"):
        pair.engine.transfer([TransferRequest(READ, memoryview(sink), pair.segment, 0)])
    assert sink == bytes(100)
    assert pair.engine.counters()["failed"] == 1
    pair.engine.faults.dead = False
    pair.engine.transfer([TransferRequest(READ, memoryview(sink), pair.segment, 0)])
    assert sink == b"\3" * 100


def test_loss_is_a_seeded_share_of_the_requests(make_pair):
    pair = make_pair("loopback", 1000, faults=Faults(loss=0.3, seed=5))
    pair.memory[:] = 3
    sink = bytearray(1000)
    batch = pair.engine.allocate_batch_id(1000)
    pair.engine.submit_transfer(
        batch, [TransferRequest(READ, memoryview(sink)[i : i + 1], pair.segment, i) for i in range(1000)]
    )
    statuses = pair.engine.wait(batch, 60)
    lost = [status.state == TransferState.FAILED for status in statuses]
    assert 230 < sum(lost) < 370
    assert list(sink) == [0 if gone else 3 for gone in lost]
    assert pair.engine.counters() == {
        **dict.fromkeys(pair.engine.counters(), 0),
        "failed": sum(lost),
        "loopback_read": 1000 - sum(lost),
    }
    again = Faults(loss=0.3, seed=5)
    requests = [TransferRequest(READ, memoryview(sink), pair.segment, 0)] * 1000
    assert [again.decide("loopback", request) is not None for request in requests] == lost


def test_faults_keep_to_their_paths_and_requests(make_pair):
    pair = make_pair("tcp", 100)
    request = TransferRequest(READ, memoryview(bytearray(10)), pair.segment, 50)
    assert Faults(dead=True, paths=frozenset({"shm"})).decide("tcp", request) is None
    assert Faults(dead=True, only=lambda r: r.offset == 0).decide("tcp", request) is None
    assert Faults(dead=True, only=lambda r: r.offset == 50).decide("tcp", request) is not None
    assert Faults().decide("tcp", request) is None
    assert (
        Faults(corrupt_byte=3).decide("tcp", TransferRequest(READ, memoryview(b""), pair.segment, 0)) is None
    )


def test_latency_delays_and_beyond_the_deadline_times_out(make_pair):
    pair = make_pair("shm", 100, faults=Faults(delay_seconds=0.1))
    began = time.monotonic()
    pair.engine.transfer([TransferRequest(WRITE, memoryview(b"x"), pair.segment, 0)])
    assert time.monotonic() - began >= 0.1
    with pytest.raises(TransferError, match="request 0: TIMEOUT: "):
        pair.engine.transfer(
            [TransferRequest(WRITE, memoryview(b"y"), pair.segment, 0)], timeout_seconds=0.01
        )
    assert pair.memory[0] == ord("x")


@pytest.mark.parametrize("knobs", [{"loss": 1.5}, {"loss": -1}, {"delay_seconds": -1}])
def test_knobs_out_of_range(knobs):
    with pytest.raises(ValueError, match="must lie in"):
        Faults(**knobs)

"""What must not happen does not, and the reason says which rule it broke."""

import msgspec
import numpy as np
import pytest

from kvstore.transfer import READ, WRITE, Faults, TransferError, TransferRequest, TransferState
from kvstore.transfer.segment import Peer, Segment

PATHS = ("loopback", "shm", "tcp")
FAILED, TIMEOUT, COMPLETED = TransferState.FAILED, TransferState.TIMEOUT, TransferState.COMPLETED
OLD = bytes(range(100, 110))


def ends(engine, *requests):
    """Statuses of the requests, submitted together."""
    batch = engine.allocate_batch_id(len(requests))
    engine.submit_transfer(batch, list(requests))
    statuses = engine.wait(batch, 60)
    engine.free_batch_id(batch)
    return statuses


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("offset", [91, 100, 101, 2**62, 2**63 - 1])
def test_out_of_bounds_moves_nothing_and_spares_its_batch_mates(make_pair, path, offset):
    pair = make_pair(path, 100)
    pair.memory[:] = 7
    sink, good = bytearray(OLD), bytearray(10)
    read, write, fine = ends(
        pair.engine,
        TransferRequest(READ, memoryview(sink), pair.segment, offset),
        TransferRequest(WRITE, memoryview(OLD), pair.segment, offset),
        TransferRequest(READ, memoryview(good), pair.segment, 90),
    )
    assert (read.state, write.state, fine.state) == (FAILED, FAILED, COMPLETED)
    assert read.reason == f"10 bytes at {offset} are out of bounds of segment 'pair' of 100 bytes"
    assert (read.nbytes_done, bytes(sink), bytes(good)) == (0, OLD, b"\7" * 10)
    assert (pair.memory == 7).all()
    assert pair.engine.counters()["failed"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_the_owner_checks_bounds_itself(make_pair, path):
    pair = make_pair(path, 100)
    pair.memory[:] = 7
    boast = msgspec.structs.replace(pair.segment, nbytes=1 << 40)
    sink = bytearray(OLD)
    read, write = ends(
        pair.engine,
        TransferRequest(READ, memoryview(sink), boast, 95),
        TransferRequest(WRITE, memoryview(OLD), boast, 95),
    )
    assert (read.state, write.state) == (FAILED, FAILED)
    assert "100" in read.reason
    assert read.reason == write.reason
    assert bytes(sink) == OLD
    assert (pair.memory == 7).all()
    assert ends(pair.engine, TransferRequest(READ, memoryview(sink), pair.segment, 0))[0].state == COMPLETED


@pytest.mark.parametrize("path", ["loopback", "tcp"])
def test_unknown_segment(make_pair, path):
    pair = make_pair(path, 100)
    sink = bytearray(OLD)
    other = msgspec.structs.replace(pair.segment, name="nobody")
    (status,) = ends(pair.engine, TransferRequest(READ, memoryview(sink), other, 0))
    assert status.state == FAILED
    assert "unknown segment: 'nobody' is not registered" in status.reason
    pair.owner.unregister("pair")
    large = np.ones(100, np.uint8)
    (status,) = ends(pair.engine, TransferRequest(WRITE, memoryview(large), pair.segment, 0))
    assert "'pair' is not registered" in status.reason
    assert bytes(sink) == OLD
    assert not pair.memory.any()


def test_a_refused_large_write_leaves_the_connection_usable(make_pair):
    pair = make_pair("tcp", 8 << 20)
    other = msgspec.structs.replace(pair.segment, name="nobody")
    source = np.ones(8 << 20, np.uint8)
    for _ in range(2):
        assert ends(pair.engine, TransferRequest(WRITE, memoryview(source), other, 0))[0].state == FAILED
        assert (
            ends(pair.engine, TransferRequest(WRITE, memoryview(source), pair.segment, 0))[0].state
            == COMPLETED
        )
    assert pair.memory.all()


def test_another_epoch_at_the_same_address_is_stale(make_engine):
    old = make_engine()
    old_segment = old.register_local_memory(bytearray(OLD), name="m")
    engine = make_engine()
    sink = bytearray(10)
    engine.transfer([TransferRequest(READ, memoryview(sink), old_segment, 0)])
    old.close()
    new = make_engine(port=old.peer.rails[0][1])
    memory = bytearray(b"new memory")
    new_segment = new.register_local_memory(memory, name="m")
    assert new.peer.rails == old.peer.rails
    sink[:] = OLD
    for _ in range(2):
        read, write = ends(
            engine,
            TransferRequest(READ, memoryview(sink), old_segment, 0),
            TransferRequest(WRITE, memoryview(OLD), old_segment, 0),
        )
        assert (read.state, write.state) == (FAILED, FAILED)
        assert "stale segment" in read.reason
        assert f"{old.peer.epoch:016x}" in read.reason
        assert bytes(sink) == OLD
        assert memory == b"new memory"
        engine.transfer([TransferRequest(READ, memoryview(bytearray(10)), new_segment, 0)])


def test_nobody_listens(make_engine):
    peer = make_engine()
    segment = peer.register_local_memory(bytearray(10), name="m")
    peer.close()
    (status,) = ends(make_engine(), TransferRequest(READ, memoryview(bytearray(10)), segment, 0))
    assert status.state == FAILED
    assert f"'host-0' at 127.0.0.1:{peer.peer.rails[0][1]}: Connection refused" in status.reason
    nowhere = Segment(Peer(1, "elsewhere", []), "m", 10)
    (status,) = ends(make_engine(), TransferRequest(READ, memoryview(bytearray(10)), nowhere, 0))
    assert status.reason == "peer 'elsewhere' has no network address"


@pytest.mark.parametrize("path", ["loopback", "tcp"])
def test_read_only_memory_serves_reads_only(make_engine, path):
    owner = make_engine()
    engine = owner if path == "loopback" else make_engine()
    segment = owner.register_local_memory(OLD, name="constant")
    sink = bytearray(10)
    engine.transfer([TransferRequest(READ, memoryview(sink), segment, 0)])
    assert bytes(sink) == OLD
    with pytest.raises(TransferError, match=r"1 of 1 requests did not complete.*'constant' is read-only"):
        engine.transfer([TransferRequest(WRITE, memoryview(bytes(10)), segment, 0)])


def test_malformed_requests_raise_and_start_nothing(make_pair):
    pair = make_pair("loopback", 100)
    good = TransferRequest(WRITE, memoryview(OLD), pair.segment, 0)
    matrix = np.zeros((10, 10), np.uint8)
    batch = pair.engine.allocate_batch_id(2)
    for error, match, bad in [
        (
            ValueError,
            "request 1: READ into a read-only buffer",
            TransferRequest(READ, memoryview(OLD), pair.segment, 0),
        ),
        (
            ValueError,
            "request 1: .*not C-contiguous",
            TransferRequest(WRITE, memoryview(matrix[:, 3]), pair.segment, 0),
        ),
        (
            ValueError,
            "request 1: .*not C-contiguous",
            TransferRequest(WRITE, memoryview(matrix.T), pair.segment, 0),
        ),
        (ValueError, "request 1: offset -1", TransferRequest(WRITE, memoryview(OLD), pair.segment, -1)),
        (ValueError, "request 1: offset", TransferRequest(WRITE, memoryview(OLD), pair.segment, 2**63)),
        (ValueError, "3 is not a valid Opcode", TransferRequest(3, memoryview(OLD), pair.segment, 0)),
        (TypeError, "request 1: local is a bytes", TransferRequest(WRITE, OLD, pair.segment, 0)),
        (TypeError, "request 1: target is a str", TransferRequest(WRITE, memoryview(OLD), "pair", 0)),
    ]:
        with pytest.raises(error, match=match):
            pair.engine.submit_transfer(batch, [good, bad])
    with pytest.raises(ValueError, match="batch of 2 requests holds 0: no room for 3 more"):
        pair.engine.submit_transfer(batch, [good] * 3)
    assert pair.engine.wait(batch, 0) == []
    assert not pair.memory.any()


def test_batches_are_known_until_freed_and_freed_only_when_at_rest(make_pair):
    pair = make_pair("tcp", 10, faults=Faults(delay_seconds=3600), timeout_seconds=3600)
    engine = pair.engine
    batch = engine.allocate_batch_id(1)
    with pytest.raises(IndexError, match="request 0 of a batch that holds 0"):
        engine.get_transfer_status(batch, 0)
    engine.submit_transfer(batch, [TransferRequest(WRITE, memoryview(OLD), pair.segment, 0)])
    with pytest.raises(TransferError, match="in flight"):
        engine.free_batch_id(batch)
    assert not engine.wait(batch, 0)[0].state.is_final
    engine.close()
    assert engine.get_transfer_status(batch, 0) == engine.wait(batch)[0]
    assert (engine.wait(batch)[0].state, engine.wait(batch)[0].reason) == (FAILED, "the engine was closed")
    engine.free_batch_id(batch)
    for call in (engine.free_batch_id, engine.wait):
        with pytest.raises(ValueError, match="was never allocated, or is freed"):
            call(batch)
    with pytest.raises(TransferError, match="closed"):
        engine.transfer([TransferRequest(WRITE, memoryview(OLD), pair.segment, 0)])


def test_registration_checks(make_engine, make_shared):
    engine = make_engine()
    engine.register_local_memory(bytearray(5), name="m")
    with pytest.raises(ValueError, match="'m' is registered already"):
        engine.register_local_memory(bytearray(5), name="m")
    for name in ("", "x" * 501):
        with pytest.raises(ValueError, match="expected 1 to 500"):
            engine.register_local_memory(bytearray(5), name=name)
    with pytest.raises(ValueError, match="not C-contiguous"):
        engine.register_local_memory(np.zeros((4, 4))[:, 1], name="column")
    with pytest.raises(TypeError):
        engine.register_local_memory(7, name="number")
    shared = make_shared("part", 100)
    with pytest.raises(ValueError, match=r"has 50 bytes, its file .* 100: register all of it"):
        engine.register_local_memory(shared.array[:50], name="part", shm_path=shared.path)
    with pytest.raises(ValueError, match="'gone' is not registered"):
        engine.unregister("gone")
    engine.unregister("m")
    assert engine.register_local_memory(bytearray(6), name="m").nbytes == 6


def test_engine_arguments(make_engine):
    for arguments in (
        {"host": "0.0.0.0"},
        {"timeout_seconds": 0},
        {"connections_per_peer": 0},
        {"rate_limit_nbytes_per_second": 0},
    ):
        with pytest.raises(ValueError, match=r"dial|positive"):
            make_engine(**arguments)
    taken = make_engine().peer.rails[0][1]
    with pytest.raises(OSError, match="in use"):
        make_engine(port=taken)

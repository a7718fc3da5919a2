"""Writes from elsewhere that arrive late: after their reservation is over they never reach what is in the slot."""

from __future__ import annotations

import socket
import zlib

import msgspec
import numpy as np
import pytest

from kvstore import messages as m
from kvstore.client.remote_put import put_on
from kvstore.errors import InvalidError, StaleError
from kvstore.rpc import Stub
from kvstore.transfer import READ, WRITE, TransferError, TransferRequest
from kvstore.transfer.transport import wire

NBYTES = 1000
OLD, NEW = b"o" * 16, b"n" * 16
LATE, GOOD = b"x" * NBYTES, b"y" * NBYTES


class LateWriter:
    """Reserves the only slot of `store` for the key OLD; sends its bytes when the test says so."""

    def __init__(self, store):
        self.stub = Stub(store.server.address, m.NODE)
        self.epoch = store.node.epoch
        self.reply = self.stub.reserve(m.NodeReserve(self.epoch, [OLD], NBYTES, NBYTES))
        offset = np.array([self.reply.items[0].offset])
        frame = wire.pack_frame(
            WRITE, store.node.segment.name, offset, np.array([NBYTES]), NBYTES, 30.0, self.reply.handle
        )
        self._unsent = frame + LATE
        self._socket = socket.create_connection(store.engine.peer.rails[0], timeout=30)
        self._socket.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, 0, 0, 5, store.engine.peer.epoch))
        assert len(self._socket.recv(wire.HELLO.size, socket.MSG_WAITALL)) == wire.HELLO.size

    def send(self, keep_back: int = 0) -> None:
        end = len(self._unsent) - keep_back
        self._socket.sendall(self._unsent[:end])
        self._unsent = self._unsent[end:]

    def answer(self) -> tuple[int, str] | None:
        """Status and reason; None: the connection was cut."""
        raw = self._socket.recv(wire.ANSWER.size, socket.MSG_WAITALL)
        if len(raw) < wire.ANSWER.size:
            return None
        _, status, reason_nbytes = wire.ANSWER.unpack(raw)
        return status, self._socket.recv(reason_nbytes, socket.MSG_WAITALL).decode()

    def abort(self) -> None:
        self.stub.abort(m.HandleRequest(self.epoch, self.reply.handle))

    def commit(self) -> list[bool]:
        item = m.CommitItem(0, [zlib.crc32(LATE)])
        return self.stub.commit(m.CommitRequest(self.epoch, self.reply.handle, [item])).flags

    def close(self) -> None:
        self._socket.close()
        self.stub.close()


@pytest.fixture
def scene(cluster):
    """`scene(lease_seconds)`: a node with one slot, its in-process client, and a writer that has reserved it."""
    writers = []

    def make(lease_seconds: float = 10.0):
        store = cluster.node("a", num_slots=1, lease_seconds=lease_seconds)
        writers.append(LateWriter(store))
        return store, cluster.client(store), writers[0]

    yield make
    for writer in writers:
        writer.close()


def arriving(store) -> bool:
    """Whether the store is in the middle of receiving a write."""
    return any(block.num_writes for block in store.node._store._pool._written_slots.values())


def test_a_write_in_time_is_committed(scene):
    _store, home, writer = scene()
    writer.send()
    assert writer.answer() == (wire.OK, "")
    assert writer.commit() == [True]
    assert home.get([OLD]) == [LATE]


def test_a_write_that_comes_after_its_slot_was_given_to_another_key_is_refused(scene, eventually):
    _store, home, writer = scene(lease_seconds=0.05)
    eventually(lambda: home.put([NEW], [GOOD]) == ["stored"])
    writer.send()
    status, reason = writer.answer()
    assert status == wire.REFUSED
    assert "the write is refused: reservation" in reason
    assert home.get([NEW]) == [GOOD]
    with pytest.raises(StaleError):
        writer.commit()


def test_a_reservation_is_over_in_its_time_though_nobody_has_called_the_node_since(scene):
    store, home, writer = scene()
    now = store.node._store._clock()
    store.node._store._clock = lambda: now + 10.1
    writer.send()
    assert writer.answer()[0] == wire.REFUSED
    assert home.put([NEW], [GOOD]) == ["stored"]


def test_a_write_that_comes_while_another_writer_has_the_slot_is_refused(scene):
    store, home, writer = scene()
    writer.abort()
    with store.node.reserve([NEW], NBYTES, NBYTES) as reservation:
        assert reservation.offset(0) == writer.reply.items[0].offset
        reservation.buffer(0)[:] = GOOD
        writer.send()
        assert writer.answer()[0] == wire.REFUSED
        reservation.commit(0)
    assert home.get([NEW]) == [GOOD]


def test_a_slot_is_not_reused_while_a_given_up_write_is_arriving(scene, eventually):
    store, home, writer = scene()
    writer.send(keep_back=500)
    eventually(lambda: arriving(store))
    writer.abort()
    assert home.put([NEW], [GOOD]) == ["no_room"]
    assert store.node.stats()["draining"] == 1
    writer.send()
    assert writer.answer() == (wire.OK, "")
    eventually(lambda: home.put([NEW], [GOOD]) == ["stored"])
    assert home.get([NEW]) == [GOOD]


def test_a_write_is_cut_off_when_its_reservation_expires(scene, eventually):
    _store, home, writer = scene(lease_seconds=0.3)
    writer.send(keep_back=500)
    assert writer.answer() is None
    eventually(lambda: home.put([NEW], [GOOD]) == ["stored"])
    assert home.get([NEW]) == [GOOD]


def test_a_commit_waits_for_no_write_and_lets_none_in(scene, eventually):
    store, home, writer = scene()
    writer.send(keep_back=500)
    eventually(lambda: arriving(store))
    with pytest.raises(InvalidError, match="1 writes into slot 0 are arriving"):
        writer.commit()
    assert home.exists([OLD]) == [False]
    writer.send()
    assert writer.answer() == (wire.OK, "")
    assert writer.commit() == [True]
    assert home.get([OLD]) == [LATE]


def test_a_node_closes_while_a_write_is_arriving(scene, eventually):
    store, _home, writer = scene(lease_seconds=0.3)
    writer.send(keep_back=500)
    eventually(lambda: arriving(store))
    store.node.close()
    assert writer.answer() is None


@pytest.mark.parametrize("host_id", ["host-a", "elsewhere"])
def test_a_writer_that_learns_late_of_its_reservation_harms_nobody(cluster, eventually, host_id):
    """Its process stood still between the node's answer and its write, which therefore comes too late."""
    store = cluster.node("a", num_slots=1, lease_seconds=0.05)
    home, engine = cluster.client(store), cluster.engine(host_id)
    info = home.replica.node("a")
    stub = Stub(store.server.address, m.NODE)
    reserve = stub.reserve

    def reserve_and_stand_still(request, timeout):
        reply = reserve(request, timeout=timeout)
        eventually(lambda: home.put([NEW], [GOOD]) == ["stored"])
        return msgspec.structs.replace(reply, lease_seconds=60.0)  # as if its clock had stood still too

    stub.reserve = reserve_and_stand_still
    deadline = float("inf")
    assert put_on(info, [OLD], [memoryview(LATE)], NBYTES, stub=stub, engine=engine, deadline=deadline) == [
        "failed"
    ]
    assert home.get([NEW, OLD]) == [GOOD, None]
    stub.close()


def test_peers_write_into_a_reservation_with_its_permit_only_and_into_its_objects_only(cluster):
    store, engine = cluster.node("a", num_slots=2), cluster.engine()
    segment = store.node.segment
    with store.node.reserve([NEW], NBYTES, NBYTES) as reservation:
        offset = reservation.offset(0)

        def write(at: int, data: bytes, permit: int) -> None:
            engine.transfer([TransferRequest(WRITE, memoryview(data), segment, at, permit)])

        for at, data, permit in (
            (offset, GOOD, 0),
            (offset, GOOD, reservation.permit ^ 1),
            (offset - 1, GOOD, reservation.permit),
            (offset + 1, GOOD, reservation.permit),
            (0, b"generati", reservation.permit),
            (offset + 1024, GOOD, reservation.permit),
        ):
            with pytest.raises(TransferError, match="the write is refused"):
                write(at, data, permit)
        write(offset, GOOD[:600], reservation.permit)
        write(offset + 600, GOOD[600:], reservation.permit)
        reservation.commit(0)
    sink = bytearray(NBYTES)
    engine.transfer([TransferRequest(READ, memoryview(sink), segment, offset)])
    assert sink == GOOD
    with pytest.raises(TransferError, match="is over"):
        write(offset, LATE, reservation.permit)

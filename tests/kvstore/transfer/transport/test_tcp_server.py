"""The server against clients that do not play by the rules: nothing crashes, bloats, leaks or is written."""

import contextlib
import os
import random
import socket
import struct
import time

import numpy as np
import pytest

from kvstore.transfer import READ, TransferError, TransferRequest
from kvstore.transfer.registry import Registry
from kvstore.transfer.segment import Peer, Segment
from kvstore.transfer.transport import wire
from kvstore.transfer.transport.copies import Copies
from kvstore.transfer.transport.tcp_server import TcpServer, listen

EPOCH = 77


@pytest.fixture
def registry():
    registry = Registry(Peer(EPOCH, "owner", []))
    registry.add(bytearray(b"0123456789"), "cpu:0", "m", "")
    return registry


@pytest.fixture
def dial(registry, nothing_leaks):
    """Opens raw connections to a server, greeted unless told otherwise."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    server = TcpServer(listener, EPOCH, registry, None, Copies(), max_sessions=4)
    sockets = []

    def dial(greeted=True):
        sock = socket.create_connection(address, timeout=30)
        sockets.append(sock)
        if greeted:
            sock.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, 0, 0, 5, EPOCH))
            assert wire.HELLO.unpack(read(sock, wire.HELLO.size)) == (
                wire.MAGIC,
                wire.VERSION,
                0,
                0,
                EPOCH,
                5,
            )
        return sock

    yield dial
    for sock in sockets:
        sock.close()
    server.close()


def read(sock, nbytes):
    raw = b""
    while len(raw) < nbytes:
        part = sock.recv(nbytes - len(raw))
        assert part, f"closed after {raw!r}"
        raw += part
    return raw


def is_cut(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def frame(opcode, pieces, nbytes, name="m", timeout=30.0):
    offsets, lengths = np.array([p[0] for p in pieces]), np.array([p[1] for p in pieces])
    return wire.pack_frame(opcode, name, offsets, lengths, nbytes, timeout)


def answer(sock):
    magic, status, reason_nbytes = wire.ANSWER.unpack(read(sock, wire.ANSWER.size))
    assert magic == wire.ANSWER_MAGIC
    return status, read(sock, reason_nbytes).decode()


def test_the_wire_format_byte_by_byte(dial, registry):
    """What docs and other implementations may rely on."""
    sock = dial()
    sock.sendall(
        bytes.fromhex(
            "4d52464d 02 00 0100 02000000 30750000 0300000000000000 2a00000000000000 0000000000000000"
        )
        + b"m"
    )
    sock.sendall(struct.pack("<4Q", 1, 2, 9, 1) + b"abc")
    assert read(sock, 8) == bytes.fromhex("414e535200000000")
    with registry.use("m") as memory:
        assert bytes(memory) == b"0ab345678c"
    sock.sendall(frame(1, [(8, 2), (0, 3)], 5))
    assert read(sock, 8) == bytes.fromhex("414e535200000000")
    assert read(sock, 5) == b"8c0ab"


@pytest.mark.parametrize("seed", range(5))
def test_random_garbage_ends_the_connection(dial, seed, registry):
    noise = random.Random(seed).randbytes(5000)
    raw, greeted = dial(greeted=False), dial()
    for sock in (raw, greeted):
        sock.settimeout(30)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(noise)
        assert is_cut(sock)
    with registry.use("m") as memory:
        assert bytes(memory) == b"0123456789"


MAGIC = wire.FRAME_MAGIC


@pytest.mark.parametrize(
    "header",
    [
        (MAGIC ^ 1, 1, 0, 1, 1, 3_600_000, 1, 0, 0),
        (MAGIC, 0, 0, 1, 1, 3_600_000, 1, 0, 0),
        (MAGIC, 3, 0, 1, 1, 3_600_000, 1, 0, 0),
        (MAGIC, 1, 0, 0, 1, 3_600_000, 1, 0, 0),
        (MAGIC, 1, 0, 2001, 1, 3_600_000, 1, 0, 0),
        (MAGIC, 1, 0, 1, 0, 3_600_000, 1, 0, 0),
        (MAGIC, 1, 0, 1, 1025, 3_600_000, 1, 0, 0),
        (MAGIC, 1, 0, 1, 2**32 - 1, 3_600_000, 1, 0, 0),
        (MAGIC, 2, 0, 1, 1, 3_600_000, (16 << 20) + 1, 0, 0),
        (MAGIC, 2, 0, 1, 1, 3_600_000, 2**64 - 1, 0, 0),
    ],
)
def test_headers_out_of_limits_end_the_connection_before_anything_is_allocated(dial, header):
    sock = dial()
    sock.sendall(wire.FRAME.pack(*header))
    assert is_cut(sock)
    assert not is_cut_soon(dial())


def is_cut_soon(sock):
    sock.settimeout(0.02)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "piece", [(8, 3), (11, 0), (2**63, 1), (0, 2**63), (2**64 - 1, 2), (2**64 - 1, 2**64 - 1)]
)
@pytest.mark.parametrize("opcode", [1, 2])
def test_tables_out_of_bounds_are_refused_before_a_byte_moves(dial, registry, opcode, piece):
    sock = dial()
    table = struct.pack("<4Q", 0, 4, *piece)
    sock.sendall(
        wire.FRAME.pack(MAGIC, opcode, 0, 1, 2, 30_000, 6, 0, 0)
        + b"m"
        + table
        + (b"xxxxxx" if opcode == 2 else b"")
    )
    status, reason = answer(sock)
    assert status == wire.REFUSED
    assert "out of bounds of segment 'm' of 10 bytes" in reason
    with registry.use("m") as memory:
        assert bytes(memory) == b"0123456789"
    sock.sendall(frame(1, [(0, 2)], 2))  # and the connection is still good
    assert answer(sock) == (wire.OK, "")
    assert read(sock, 2) == b"01"


def test_a_table_that_does_not_sum_to_the_payload_ends_the_connection(dial, registry):
    sock = dial()
    sock.sendall(frame(2, [(0, 4)], 5) + b"xxxxx")
    assert is_cut(sock)
    with registry.use("m") as memory:
        assert bytes(memory) == b"0123456789"


def test_a_name_that_is_not_utf8_is_unknown(dial):
    sock = dial()
    sock.sendall(wire.FRAME.pack(MAGIC, 1, 0, 2, 1, 30_000, 1, 0, 0) + b"\xff\xfe" + struct.pack("<2Q", 0, 1))
    status, reason = answer(sock)
    assert status == wire.REFUSED
    assert "unknown segment" in reason


def test_hellos_of_others_are_refused(dial):
    stale = dial(greeted=False)
    stale.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, 0, 0, 5, EPOCH + 1))
    assert wire.HELLO.unpack(read(stale, wire.HELLO.size))[2:5:2] == (wire.HELLO_STALE, EPOCH)
    assert is_cut(stale)
    newer = dial(greeted=False)
    newer.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION + 1, 0, 0, 5, EPOCH))
    assert wire.HELLO.unpack(read(newer, wire.HELLO.size))[1] == wire.VERSION
    assert is_cut(newer)


def test_connections_beyond_the_limit_are_turned_away_and_room_returns(dial):
    open_ones = [dial() for _ in range(4)]
    assert is_cut(dial(greeted=False))
    open_ones[0].close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        sock = dial(greeted=False)
        sock.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, 0, 0, 5, EPOCH))
        if not is_cut(sock):
            return
    pytest.fail("the place of a closed connection was not given to another")


def test_a_write_whose_sender_stalls_is_given_up_and_frees_the_segment(dial, registry):
    sock = dial()
    sock.sendall(frame(2, [(0, 10)], 10, timeout=0.2) + b"abc")
    assert is_cut(sock)
    registry.remove("m", 30)


def test_a_segment_in_use_is_withdrawn_only_after_its_transfer(dial, registry):
    sock = dial()
    sock.sendall(frame(2, [(0, 10)], 10) + b"abcde")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # until the server has begun with it
        with registry.use("m") as memory:
            if bytes(memory) == b"abcde56789":
                break
    else:
        pytest.fail("the write did not begin")
    with pytest.raises(TransferError, match="'m' has 1 transfers in flight"):
        registry.remove("m", 0)
    sock.sendall(b"fghij")
    registry.remove("m", 30)
    assert answer(sock) == (wire.OK, "")
    sock.sendall(frame(1, [(0, 1)], 1))
    assert answer(sock)[0] == wire.REFUSED


def test_a_claim_of_much_memory_costs_none(dial):
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    for _ in range(3):
        dial().sendall(
            frame(2, [(0, 1)], 16 << 20, name="nobody")
        )  # a refused payload is drained, never held
    with open("/proc/self/statm") as file:
        assert (int(file.read().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE") < 8 << 20


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 40, "not a transfer engine"),
        (bytes(wire.HELLO.size), "not a transfer engine"),
        (b"", "closed the connection"),
        (wire.HELLO.pack(wire.MAGIC, wire.VERSION, wire.HELLO_OK, 0, 1, 0), "stale segment"),
    ],
    ids=["http", "zeros", "nothing", "another epoch"],
)
def test_an_address_where_something_else_answers_fails_with_a_reason(make_engine, reply, reason):
    with socket.create_server(("127.0.0.1", 0)) as other:
        peer = Peer(2, "other", [other.getsockname()])
        engine = make_engine()
        batch = engine.allocate_batch_id(1)
        request = TransferRequest(READ, memoryview(bytearray(10)), Segment(peer, "m", 10), 0)
        engine.submit_transfer(batch, [request])
        sock, _ = other.accept()
        with sock:
            sock.sendall(reply)
            with contextlib.suppress(OSError):  # the engine may have left by now
                sock.shutdown(socket.SHUT_WR)
            (status,) = engine.wait(batch, 30)
    assert status.state == "FAILED"
    assert reason in status.reason

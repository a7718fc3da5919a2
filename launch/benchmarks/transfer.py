"""Suite `transfer`: one-sided writes and reads between two processes on loopback, and the same-host copy.

`tcp_{write,read}_PIECE`: one batch of pieces, up to 2,048 of them and 256 MB; every other one first, so that nobody can
merge neighbours. The peer moves the same. The ceiling is the best of 1, 2 and 4 raw connections that move 256 MB the same
way in the same round.
`tcp_read_1MB_crc`: with the crc32 of every piece computed and compared, on one thread. `shm_copy_256MB`: a write
through shared memory; the ceiling is one thread's memcpy of 256 MB within this process.
"""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvstore.transfer import READ, WRITE, TransferEngine, TransferRequest
from kvstore.transfer.request import Opcode
from kvstore.transfer.segment import Segment
from kvstore.transfer.transport.shm import SharedBuffer
from launch.benchmarks.options import Options
from launch.benchmarks.peers import MooncakeTransferPeer
from launch.benchmarks.raw_sockets import NUM_CONNECTIONS, RawSockets
from launch.benchmarks.record import Row, measure

NBYTES = 1 << 28
PIECES = {"16KB": 1 << 14, "128KB": 1 << 17, "1MB": 1 << 20, "16MB": 1 << 24, "256MB": 1 << 28}
MAX_PIECES = 2048
OPCODES = {"write": WRITE, "read": READ}
VERIFIED, SHM = "tcp_read_1MB_crc", "shm_copy_256MB"


def _own_memory(pipe: Connection, host_id: str, nbytes: int) -> None:
    engine = TransferEngine(host_id=host_id)
    shared = SharedBuffer("bench", nbytes)
    segment = engine.register_local_memory(shared.array, name="bench", shm_path=shared.path)
    pipe.send_bytes(msgspec.msgpack.encode(segment))
    pipe.recv_bytes()
    engine.close()
    shared.close()


@contextmanager
def remote_memory(host_id: str) -> Iterator[Segment]:
    """Memory registered by another process, on `host_id`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_own_memory, args=(there, host_id, NBYTES))
    process.start()
    try:
        yield msgspec.msgpack.decode(here.recv_bytes(), type=Segment)
    finally:
        here.send_bytes(b"")
        process.join(10)


def _speed(
    engine: TransferEngine,
    segment: Segment,
    opcode: Opcode,
    piece: int,
    total: int,
    local: np.ndarray,
) -> float:
    view = local.data
    offsets = [*range(0, total, 2 * piece), *range(piece, total, 2 * piece)]
    requests = [TransferRequest(opcode, view[o : o + piece], segment, o) for o in offsets]
    start = time.perf_counter()
    engine.transfer(requests, timeout_seconds=60)
    return total / (time.perf_counter() - start) / 1e9


def _verified_speed(
    engine: TransferEngine, segment: Segment, piece: int, total: int, local: np.ndarray, crc: int
) -> float:
    """Reads, then compares the crc32 of every piece: what a store does with bytes that came over a network."""
    start = time.perf_counter()
    _speed(engine, segment, READ, piece, total, local)
    if any(zlib.crc32(local.data[at : at + piece]) != crc for at in range(0, total, piece)):
        raise AssertionError("a piece arrived damaged")
    return total / (time.perf_counter() - start) / 1e9


def _copy_speed(source: np.ndarray, target: np.ndarray) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return len(source) / (time.perf_counter() - start) / 1e9


class _Bench:
    """This process's engine and memory, the other processes, and the peer if it is installed."""

    def __init__(self, options: Options, stack: ExitStack):
        self._options = options
        self._engine = TransferEngine(host_id="bench-here")
        stack.callback(self._engine.close)
        self._local = np.ones(NBYTES, np.uint8)
        self._far = stack.enter_context(remote_memory("bench-there"))
        self._near = stack.enter_context(remote_memory("bench-here"))
        self._raw = [stack.enter_context(RawSockets(NBYTES, n)) for n in NUM_CONNECTIONS]
        self._peer = (
            stack.enter_context(MooncakeTransferPeer(options.peers))
            if options.peers and MooncakeTransferPeer.installed(options.peers)
            else None
        )

    def _measure(self, name: str, ours: Callable[[], float], **kwargs: Any) -> Row:
        return measure(name, "GB/s", "higher", ours, rounds=self._options.rounds, **kwargs)

    def _ceiling(self, op: str) -> float:
        return max(raw.gigabytes_per_second(op) for raw in self._raw)

    def tcp(self, op: str, label: str) -> Row:
        opcode, piece = OPCODES[op], PIECES[label]
        total = min(NBYTES, piece * MAX_PIECES)
        peer = self._peer
        return self._measure(
            f"tcp_{op}_{label}",
            lambda: _speed(self._engine, self._far, opcode, piece, total, self._local),
            peer=None if peer is None else lambda: peer.gigabytes_per_second(op, piece, total),
            peer_name=MooncakeTransferPeer.name,
            ceiling=lambda: self._ceiling(op),
        )

    def verified(self) -> Row:
        piece = PIECES["1MB"]
        self._local[:] = 7
        _speed(self._engine, self._far, WRITE, NBYTES, NBYTES, self._local)
        crc = zlib.crc32(self._local.data[:piece])
        return self._measure(
            VERIFIED,
            lambda: _verified_speed(self._engine, self._far, piece, NBYTES, self._local, crc),
            ceiling=lambda: self._ceiling("read"),
        )

    def shm(self) -> Row:
        other = np.ones(NBYTES, np.uint8)
        return self._measure(
            SHM,
            lambda: _speed(self._engine, self._near, WRITE, NBYTES, NBYTES, self._local),
            ceiling=lambda: _copy_speed(self._local, other),
        )


def run(options: Options) -> list[Row]:
    """The rows that `options` wants, in order."""
    with ExitStack() as stack:
        bench = _Bench(options, stack)
        rows = [
            bench.tcp(op, label) for op in OPCODES for label in PIECES if options.wants(f"tcp_{op}_{label}")
        ]
        if options.wants(VERIFIED):
            rows.append(bench.verified())
        if options.wants(SHM):
            rows.append(bench.shm())
    return rows

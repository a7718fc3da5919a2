"""Suite `transfer`: one-sided writes and reads between two processes on loopback, and the same-host copy."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from kvstore.transfer import READ, WRITE, TransferEngine, TransferRequest
from kvstore.transfer.request import Opcode
from kvstore.transfer.segment import Segment
from kvstore.transfer.transport.shm import SharedBuffer
from launch.benchmarks.options import Options
from launch.benchmarks.peers import MooncakeTransferPeer
from launch.benchmarks.record import Row, measure

NBYTES = 1 << 28
PIECES = {"16KB": 1 << 14, "128KB": 1 << 17, "1MB": 1 << 20, "16MB": 1 << 24, "256MB": 1 << 28}
MAX_PIECES = 2048


def _own_memory(pipe: Connection, host_id: str) -> None:
    engine = TransferEngine(host_id=host_id)
    shared = SharedBuffer("bench", NBYTES)
    segment = engine.register_local_memory(shared.array, name="bench", shm_path=shared.path)
    pipe.send_bytes(msgspec.msgpack.encode(segment))
    pipe.recv_bytes()
    engine.close()
    shared.close()


@contextmanager
def _remote_memory(host_id: str) -> Iterator[Segment]:
    """256 MB registered by another process, on `host_id`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_own_memory, args=(there, host_id))
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
    requests = [TransferRequest(opcode, view[o : o + piece], segment, o) for o in range(0, total, piece)]
    start = time.perf_counter()
    engine.transfer(requests, timeout_seconds=60)
    return total / (time.perf_counter() - start) / 1e9


def run(options: Options) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        engine = TransferEngine(host_id="bench-here")
        stack.callback(engine.close)
        local = np.ones(NBYTES, np.uint8)
        engine.register_local_memory(local, name="local")
        far = stack.enter_context(_remote_memory("bench-there"))
        near = stack.enter_context(_remote_memory("bench-here"))
        peer = (
            stack.enter_context(MooncakeTransferPeer(options.peers))
            if options.peers and MooncakeTransferPeer.installed(options.peers)
            else None
        )
        for op, opcode in (("write", WRITE), ("read", READ)):
            for label, piece in PIECES.items():
                name = f"tcp_{op}_{label}"
                total = min(NBYTES, piece * MAX_PIECES)
                if options.wants(name):
                    rows.append(
                        measure(
                            name,
                            "GB/s",
                            "higher",
                            lambda opcode=opcode, piece=piece, total=total: _speed(
                                engine, far, opcode, piece, total, local
                            ),
                            (
                                lambda op=op, piece=piece, total=total: peer.gigabytes_per_second(
                                    op, piece, total
                                )
                            )
                            if peer
                            else None,
                            MooncakeTransferPeer.name,
                            rounds=options.rounds,
                        )
                    )
        if options.wants("shm_copy_256MB"):
            rows.append(
                measure(
                    "shm_copy_256MB",
                    "GB/s",
                    "higher",
                    lambda: _speed(engine, near, WRITE, NBYTES, NBYTES, local),
                    rounds=options.rounds,
                )
            )
    return rows

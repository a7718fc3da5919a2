"""Rows `directory_*` and `replica_*` of suite `store`: a directory that lists a million keys, and a client's replica of it.

The keys are announced by two made-up nodes, half by each, 4,096 to a message; the directory and the client are processes
of their own. `directory_fill`: until the last announcement is answered. `directory_memory`, `replica_memory`: by how much
the resident memory of that process grew, per key; the directory's holds its log of events too. `replica_sync`: from
connecting until the client has the whole snapshot, which is also what a client does that fell too far behind.
`replica_lookup`: who holds a key, one key a call, answered by the client's replica.
"""

from __future__ import annotations

import multiprocessing
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from kvstore import Directory
from kvstore.block import KEY_NBYTES
from kvstore.directory import DirectoryReplica
from kvstore.messages import DIRECTORY, MAX_BATCH_KEYS, Announce, NodeInfo
from kvstore.rpc import Server, Stub
from kvstore.transfer import Peer, Segment
from launch.benchmarks.options import Options
from launch.benchmarks.record import Row, Series, tell

ROWS = ("directory_fill", "directory_memory", "replica_sync", "replica_memory", "replica_lookup")
NUM_KEYS = 1_000_000
NUM_LOOKUPS = 10_000
_NODES = ("one", "two")
_SILENT_SECONDS = 3600.0  # the made-up nodes do not beat
_SYNC_SECONDS = 120.0


def resident_nbytes(pid: int | str = "self") -> int:
    """Of a process, now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


class Watched(msgspec.Struct, frozen=True):
    """What one client saw: seconds to be in sync, bytes its memory grew, seconds of all its lookups."""

    sync_seconds: float
    nbytes: int
    lookup_seconds: float


def _serve(pipe: Connection) -> None:
    directory = Directory(node_timeout_seconds=_SILENT_SECONDS)
    server = Server(directory.handlers(), max_workers=directory.max_workers)
    pipe.send_bytes(server.address.encode())
    pipe.recv_bytes()
    directory.close()
    server.close()


def _watch(pipe: Connection) -> None:
    address, num_keys = msgspec.msgpack.decode(pipe.recv_bytes(), type=tuple[str, int])
    before, began = resident_nbytes(), time.perf_counter()
    replica = DirectoryReplica(address)
    if not replica.wait_in_sync(_SYNC_SECONDS):
        raise RuntimeError(f"no snapshot of {num_keys} keys in {_SYNC_SECONDS:g} s")
    sync_seconds = time.perf_counter() - began
    grown = resident_nbytes() - before
    keys = [key for name in _NODES for key in replica.keys(name)]
    if len(keys) != num_keys:
        raise RuntimeError(f"{len(keys)} keys arrived of {num_keys}")
    asked = [[key] for key in random.Random(1).sample(keys, min(NUM_LOOKUPS, num_keys))]
    began = time.perf_counter()
    found = [replica.holders(some) for some in asked]
    lookup_seconds = (time.perf_counter() - began) * NUM_LOOKUPS / len(asked)
    if not all(names for [names] in found):
        raise RuntimeError("a key was not found")
    pipe.send_bytes(msgspec.msgpack.encode(Watched(sync_seconds, grown, lookup_seconds)))
    replica.close()


@contextmanager
def _process(run: Callable[[Connection], None]) -> Iterator[tuple[Connection, int]]:
    """A process that talks through a pipe: our end of it, and its id."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there,))
    process.start()
    there.close()
    try:
        yield here, process.pid or 0
    finally:
        here.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _fill(address: str, num_keys: int) -> float:
    """Announce `num_keys` keys; seconds until the directory has them all."""
    stub = Stub(address, DIRECTORY, timeout_seconds=60.0)
    segment = Segment(Peer(1, "made-up", [("127.0.0.1", 9)]), "slots", num_keys)
    for epoch, name in enumerate(_NODES, 1):
        stub.register(NodeInfo(name, epoch, "127.0.0.1:9", "made-up", segment, num_keys, 1))
    raw = secrets.token_bytes(num_keys * KEY_NBYTES)
    keys = [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]
    batches = [keys[at : at + MAX_BATCH_KEYS] for at in range(0, num_keys, MAX_BATCH_KEYS)]
    began = time.perf_counter()
    for number, batch in enumerate(batches):
        node = number % len(_NODES)
        if not stub.announce(Announce(_NODES[node], node + 1, number // len(_NODES) + 1, batch, [], 0)).known:
            raise RuntimeError("the directory has forgotten a node")
    seconds = time.perf_counter() - began
    stub.close()
    return seconds


def directory_rows(options: Options, num_keys: int = NUM_KEYS) -> Iterator[Row]:
    """All of `ROWS`, from the same rounds; none where `options` wants none of them."""
    if not any(map(options.wants, ROWS)):
        return
    units = dict(zip(ROWS, ("s", "B/key", "s", "B/key", "µs"), strict=True))
    series = {name: Series(name, units[name], "lower") for name in ROWS}
    with _process(_serve) as (pipe, pid):
        address = pipe.recv_bytes().decode()
        before = resident_nbytes(pid)
        series["directory_fill"].add(_fill(address, num_keys), None)
        series["directory_memory"].add((resident_nbytes(pid) - before) / num_keys, None)
        for _ in range(options.rounds):
            with _process(_watch) as (watcher, _):
                watcher.send_bytes(msgspec.msgpack.encode((address, num_keys)))
                seen = msgspec.msgpack.decode(watcher.recv_bytes(), type=Watched)
            series["replica_sync"].add(seen.sync_seconds, None)
            series["replica_memory"].add(seen.nbytes / num_keys, None)
            series["replica_lookup"].add(seen.lookup_seconds / NUM_LOOKUPS * 1e6, None)
        pipe.send_bytes(b"")
    for name in filter(options.wants, ROWS):
        row = series[name].row()
        tell(row)
        yield row

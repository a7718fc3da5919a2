"""Suite `store`: the KVCache store as an engine process uses it, beside Mooncake Store.

Blocks are those of SmolLM2-135M at 256 tokens (5.9 MB, 5 layer groups with a crc32 each), 64 to a batch:

- `batch_put`: into the home node of this process, crcs computed; `batch_get_local`: copied out of it again (ceiling:
  one thread's memcpy of the same bytes); `batch_get_remote`: from a node on another host, over TCP, crcs compared;
- `range_get`: one layer group of each of those 64 blocks, from the other node, lease and release inside the clock;
- `ssd_put`: into a home node with an SSD tier in the temporary folder (`TMPDIR`), until all of it is on the device and
  journaled; `ssd_get`: 64 blocks that are on SSD only, the page cache dropped before. Without a peer;
- `put_4KB`: in batches of 64, per object; `put_4KB_single`: one object a call; `get_4KB`: one object a call. Objects of
  4 KB have a home node of their own, with slots of 4 KB, since a node has slots of one size;
- `exists`: one key a call, answered by the local replica of the directory (a few ms behind); `exists_fresh`: the same,
  asking every node. The peer asks its master, and is compared with both;
- `directory_*`, `replica_*`: a directory of a million keys (`launch/benchmarks/million_keys.py`). Without a peer.

Ours: directory and remote node are processes (`launch.directory`, `launch.kvstore`). The peer: its master and remote node
are processes too, and it writes into and reads from its own segment where ours uses the home node.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import msgspec
import numpy as np

from kvstore import Client, Node, NodeConfig
from kvstore.block import KEY_NBYTES, BlockFormat
from kvstore.node.store import SlotLayout
from kvstore.rpc import Server
from kvstore.transfer import TransferEngine
from launch.benchmarks.million_keys import NUM_KEYS, directory_rows
from launch.benchmarks.options import Options
from launch.benchmarks.peers import MooncakeStorePeer
from launch.benchmarks.record import Row, measure
from launch.benchmarks.roles import role

SMALL_NBYTES = 4096
SMALL_BATCH = 64
THERE = "there"  # the other node, and its host
_VALUE = b"x" * SMALL_NBYTES
SYNC_SECONDS = 20.0
MOVED = ("batch_put", "batch_get_local", "batch_get_remote", "range_get", "ssd_put", "ssd_get")
CALLED = {
    "put_4KB": "put_small_batch",
    "put_4KB_single": "put_small",
    "get_4KB": "get_small",
    "exists": "exists",
    "exists_fresh": "exists_fresh",
}
STORE_ROWS = (*MOVED, *CALLED)
SPILL_SECONDS = 120.0
SMOLLM2 = BlockFormat(
    num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=256, dtype="bfloat16", layers_per_group=6
)


@dataclass(frozen=True)
class Load:
    """How much of everything a round moves."""

    format: BlockFormat = SMOLLM2
    num_blocks: int = 64
    num_singles: int = 1000  # calls with one object or key each

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.format.nbytes


class StorePeer(Protocol):
    """A store to compare with."""

    name: str

    def seconds(self, op: str, count: int) -> float:
        """Of `count` single operations, or of one batch of `count` objects."""
        ...


class Stores:
    """Our side: a home node for blocks and one for small objects in this process, and a node on another host.

    The verbs of the suite return seconds; what they put, they remove after the clock has stopped.
    """

    def __init__(self, stack: ExitStack, load: Load):
        form = load.format
        self._load = load
        self._blocks = np.random.default_rng(30).integers(0, 256, (load.num_blocks, form.nbytes), np.uint8)
        self._into = np.ones_like(self._blocks)
        self._ranges = np.ones((load.num_blocks, form.group_nbytes), np.uint8)
        self._near, self._far = _new_keys(load.num_blocks), _new_keys(load.num_blocks)
        self._small = _new_keys(SMALL_BATCH)
        self._directory = stack.enter_context(role("directory"))
        stack.enter_context(
            role(
                "kvstore",
                f"--name={THERE}",
                f"--directory={self._directory}",
                f"--host_id={THERE}",
                f"--slot_bytes={form.nbytes}",
                f"--dram_bytes={_dram_nbytes(load.num_blocks, form.nbytes)}",
            )
        )
        engine = TransferEngine(host_id="here")
        stack.callback(engine.close)
        outside = _client(stack, self._directory, engine, None)
        _until(lambda: outside.replica.node(THERE) is not None)
        _expect_stored(outside.put(self._far, list(self._blocks), form.group_nbytes))
        self._client = self._at_home(stack, engine, "blocks", 2 * load.num_blocks, form.nbytes)
        num_small = SMALL_BATCH + max(load.num_singles, SMALL_BATCH)
        self._small_client = self._at_home(stack, engine, "small", num_small, SMALL_NBYTES)
        _expect_stored(self._client.put(self._near, list(self._blocks), form.group_nbytes))
        _expect_stored(self._small_client.put(self._small, [_VALUE] * SMALL_BATCH))
        self._disk = _Disk(stack, engine, load, list(self._blocks))
        known = [*self._near, *self._far, *self._small]
        _until(lambda: all(self._client.replica.holders(known)))

    def _at_home(
        self, stack: ExitStack, engine: TransferEngine, name: str, num_slots: int, slot_nbytes: int
    ) -> Client:
        node = Node(NodeConfig(name, "here", _dram_nbytes(num_slots, slot_nbytes), slot_nbytes), engine)
        stack.callback(node.close)
        server = Server(node.handlers())
        stack.callback(server.close)
        node.join(self._directory, server.address)
        return _client(stack, self._directory, engine, node)

    def batch_put(self) -> float:
        keys, blocks = _new_keys(self._load.num_blocks), list(self._blocks)
        start = time.perf_counter()
        results = self._client.put(keys, blocks, self._load.format.group_nbytes)
        seconds = time.perf_counter() - start
        _expect_stored(results)
        self._client.remove(keys)
        return seconds

    def batch_get_local(self) -> float:
        return self._get(self._near)

    def batch_get_remote(self) -> float:
        return self._get(self._far)

    def _get(self, keys: list[bytes]) -> float:
        buffers = list(self._into)
        start = time.perf_counter()
        got = self._client.get_into(keys, buffers)
        seconds = time.perf_counter() - start
        _expect_found(got)
        return seconds

    def range_get(self) -> float:
        form, buffers = self._load.format, list(self._ranges)
        start = time.perf_counter()
        got = self._client.get_ranges_into(self._far, [(form.group_offset(1), form.group_nbytes)], buffers)
        seconds = time.perf_counter() - start
        _expect_found(got)
        return seconds

    def ssd_put(self) -> float:
        return self._disk.put()

    def ssd_get(self) -> float:
        return self._disk.get()

    def put_small_batch(self) -> float:
        keys, values = _new_keys(SMALL_BATCH), [_VALUE] * SMALL_BATCH
        start = time.perf_counter()
        results = self._small_client.put(keys, values)
        seconds = time.perf_counter() - start
        _expect_stored(results)
        self._small_client.remove(keys)
        return seconds

    def put_small(self) -> float:
        keys, values, client = _new_keys(self._load.num_singles), [_VALUE], self._small_client
        start = time.perf_counter()
        results = [client.put([key], values)[0] for key in keys]
        seconds = time.perf_counter() - start
        _expect_stored(results)
        self._small_client.remove(keys)
        return seconds

    def get_small(self) -> float:
        return self._singles(self._small_client.get)

    def exists(self) -> float:
        return self._singles(self._client.exists)

    def exists_fresh(self) -> float:
        return self._singles(lambda keys: self._client.exists(keys, fresh=True))

    def _singles(self, call: Callable[[list[bytes]], Sequence[object]]) -> float:
        batches = [[key] for key in itertools.islice(itertools.cycle(self._small), self._load.num_singles)]
        start = time.perf_counter()
        results = [call(keys)[0] for keys in batches]
        seconds = time.perf_counter() - start
        _expect_found(results)
        return seconds

    def copy(self) -> float:
        """A plain memcpy of the blocks by one thread."""
        start = time.perf_counter()
        for to, block in zip(self._into, self._blocks, strict=True):
            np.copyto(to, block)
        return time.perf_counter() - start


class _Disk:
    """A node whose DRAM holds one batch of blocks, and whose SSD holds four."""

    def __init__(self, stack: ExitStack, engine: TransferEngine, load: Load, blocks: list[np.ndarray]):
        form = load.format
        self._form, self._blocks = form, blocks
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="mooncake-ssd-")))
        self._slots = folder / "slots"
        config = NodeConfig(
            "disk",
            "here",
            _dram_nbytes(load.num_blocks, form.nbytes),
            form.nbytes,
            ssd_path=str(folder),
            ssd_nbytes=4 * load.num_blocks * (form.nbytes + 8192) + (1 << 20),
        )
        self._node = Node(config, engine)
        stack.callback(self._node.close)
        self._into = np.ones((load.num_blocks, form.nbytes), np.uint8)
        self._sets = [_new_keys(load.num_blocks) for _ in range(2)]
        for keys in self._sets:
            self._store(keys)

    def put(self) -> float:
        keys = _new_keys(len(self._blocks))
        start = time.perf_counter()
        self._store(keys)
        seconds = time.perf_counter() - start
        self._node.remove(keys)
        return seconds

    def get(self) -> float:
        """A batch that is on SSD only: the other one, read just before, has pushed it out of DRAM."""
        keys, other = self._sets
        self._node.lease(other).close()
        fd = os.open(self._slots, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        start = time.perf_counter()
        with self._node.lease(keys) as lease:
            for index, row in enumerate(self._into):
                np.copyto(row, np.frombuffer(lease.view(index), np.uint8))
        return time.perf_counter() - start

    def _store(self, keys: list[bytes]) -> None:
        form = self._form
        with self._node.reserve(keys, form.nbytes, form.group_nbytes) as slots:
            for index, block in enumerate(self._blocks):
                np.copyto(np.frombuffer(slots.buffer(index), np.uint8), block)
                slots.commit(index)
        if not self._node.spill(SPILL_SECONDS):
            raise RuntimeError(f"{self._slots} did not take the blocks: {self._node.stats()}")


def run(options: Options) -> list[Row]:
    load = Load(num_singles=100) if options.quick else Load()
    directory = list(directory_rows(options, NUM_KEYS // 10 if options.quick else NUM_KEYS))
    if not any(map(options.wants, STORE_ROWS)):
        return directory
    with ExitStack() as stack:
        peer = (
            stack.enter_context(MooncakeStorePeer(options.peers, load.num_blocks, load.format))
            if options.peers and MooncakeStorePeer.installed(options.peers)
            else None
        )
        return [*store_rows(options, load, peer), *directory]


def store_rows(options: Options, load: Load, peer: StorePeer | None) -> Iterator[Row]:
    """The rows that `options` wants, ours and `peer` under the same `load`."""
    moved = dict.fromkeys(MOVED, load.nbytes)
    moved["range_get"] = load.num_blocks * load.format.group_nbytes
    called = {
        name: (op, SMALL_BATCH if op == "put_small_batch" else load.num_singles)
        for name, op in CALLED.items()
    }
    peer_name = peer.name if peer else None
    with ExitStack() as stack:
        ours = Stores(stack, load)
        for name in filter(options.wants, moved):

            def speed(seconds: float, nbytes: int = moved[name]) -> float:
                return nbytes / seconds / 1e9

            row = measure(
                name,
                "GB/s",
                "higher",
                lambda name=name, speed=speed: speed(getattr(ours, name)()),
                (lambda name=name, speed=speed: speed(peer.seconds(name, load.num_blocks)))
                if peer and not name.startswith("ssd")
                else None,
                peer_name,
                rounds=options.rounds,
            )
            if name == "batch_get_local":
                row = msgspec.structs.replace(row, ceiling=speed(min(ours.copy() for _ in range(3))))
            yield row
        for name in filter(options.wants, called):
            op, count = called[name]
            yield measure(
                name,
                "µs",
                "lower",
                lambda op=op, count=count: getattr(ours, op)() / count * 1e6,
                (lambda op=op, count=count: peer.seconds(op, count) / count * 1e6) if peer else None,
                peer_name,
                rounds=options.rounds,
            )


def _client(stack: ExitStack, directory: str, engine: TransferEngine, home: Node | None) -> Client:
    client = Client(directory, engine=engine, home=home)
    stack.callback(client.close)
    if not client.replica.wait_in_sync(SYNC_SECONDS):
        raise RuntimeError(f"the directory at {directory} sent no snapshot in {SYNC_SECONDS:g} s")
    return client


def _new_keys(num: int) -> list[bytes]:
    return [secrets.token_bytes(KEY_NBYTES) for _ in range(num)]


def _dram_nbytes(num_slots: int, slot_nbytes: int) -> int:
    return SlotLayout(num_slots, slot_nbytes).nbytes  # a little more than the slots need: the header is in it


def _until(condition: Callable[[], bool]) -> None:
    tick, deadline = threading.Event(), time.monotonic() + SYNC_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the store did not come into the state to measure in {SYNC_SECONDS:g} s")
        tick.wait(0.005)


def _expect_stored(results: Sequence[str]) -> None:
    if set(results) != {"stored"}:
        raise RuntimeError(f"a put of {len(results)} objects answered {sorted(set(results))}")


def _expect_found(found: Sequence[object]) -> None:
    missed = sum(1 for one in found if not one)
    if missed:
        raise RuntimeError(f"{missed} of {len(found)} objects were missed")

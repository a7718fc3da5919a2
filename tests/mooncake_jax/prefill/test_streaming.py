"""KV on its way out, with a real transfer engine: what arrives where, in which order, and what holds it up."""

import threading
import time
import zlib

import ml_dtypes
import numpy as np
import pytest
from fakes.engine import FORMAT, POISON

from kvstore import Node, NodeConfig, chain_keys, root_key
from kvstore.errors import UnavailableError
from kvstore.transfer import Faults, TransferEngine
from mooncake_jax.engine.contract import GroupKV
from mooncake_jax.prefill.home_copy import HomeCopy
from mooncake_jax.prefill.lease import StagingLease
from mooncake_jax.prefill.streaming import KVStream
from mooncake_jax.request import StagingHandle
from mooncake_jax.staging_layout import StagingLayout

Z, NUM_GROUPS = FORMAT.block_tokens, FORMAT.num_groups
KEYS = chain_keys(root_key(b"fingerprint"), range(8 * Z), Z)


class Bench:
    """A prefill side with its home node, and a decode side with a staging region for `num_blocks` blocks."""

    def __init__(self, num_blocks: int = 4, home_slots: int = 8):
        self.prefill, self.decode = (
            TransferEngine(host_id="a", timeout_seconds=30.0),
            TransferEngine(host_id="b"),
        )
        self.home = Node(NodeConfig("home", "a", home_slots * FORMAT.nbytes, FORMAT.nbytes), self.prefill)
        self.layout = StagingLayout(FORMAT, num_blocks)
        self.memory = np.zeros(4096 + self.layout.nbytes, np.uint8)
        segment = self.decode.register_local_memory(self.memory, name="staging")
        handle = StagingHandle("decode-0", 1, 0, 9, segment, 4096, num_blocks, lease_seconds=4000.0)
        self.lease = StagingLease(handle, time.monotonic())
        self.progress = 0

    def stream(
        self, *, first_block: int = 0, staging: bool = True, num_keys: int = 4, again: bool = False
    ) -> KVStream:
        def on_progress() -> None:
            self.progress += 1

        return KVStream(
            self.prefill,
            self.layout,
            staging=self.lease if staging else None,
            home=HomeCopy(self.home, FORMAT, KEYS[first_block:num_keys], first_block),
            on_progress=on_progress,
            again=again,
        )

    @property
    def flags(self) -> np.ndarray:
        nbytes = self.layout.num_blocks * self.layout.row_nbytes
        return self.memory[4096 : 4096 + nbytes].view("<u4").reshape(self.layout.flags_shape)

    @property
    def blocks(self) -> np.ndarray:
        start = 4096 + self.layout.blocks_offset
        return self.memory[start:].view(FORMAT.item_dtype).reshape(-1, *FORMAT.shape)

    def close(self) -> None:
        self.home.validate()
        self.home.close()
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def kv(num_blocks: int, seed: int = 0) -> np.ndarray:
    """`[M, L, K, 2, Z, H]`."""
    return np.random.default_rng(seed).integers(0, 2**16, (num_blocks, *FORMAT.shape), FORMAT.item_dtype)


def group_of(blocks: np.ndarray, group: int) -> np.ndarray:
    layers = slice(group * FORMAT.layers_per_group, (group + 1) * FORMAT.layers_per_group)
    return np.ascontiguousarray(blocks[:, layers])


def add_all(stream: KVStream, blocks: np.ndarray, num_tokens: int, first_block: int = 0) -> None:
    for group in range(NUM_GROUPS):
        stream.add_new(GroupKV(group, first_block, group_of(blocks, group)), num_tokens)


def test_new_kv_arrives_with_flags_and_full_blocks_are_kept_at_home(bench):
    blocks = kv(4)
    stream = bench.stream(num_keys=3)
    poisoned = blocks.copy()
    poisoned[3, :, :, :, 2:] = POISON
    add_all(stream, poisoned, 3 * Z + 2)
    stream.finish()
    assert stream.streamed_nbytes == 4 * FORMAT.nbytes
    assert stream.pending_nbytes == 0
    assert (bench.blocks[:3] == blocks[:3]).all()
    assert (bench.blocks[3][:, :, :, :2] == blocks[3][:, :, :, :2]).all()
    assert not bench.blocks[3][:, :, :, 2:].any(), "undefined rows were sent"
    assert (bench.flags[:, :, 0] == 9).all()
    for block in range(4):
        for group in range(NUM_GROUPS):
            data = np.ascontiguousarray(bench.blocks[block, 2 * group : 2 * group + 2])
            assert bench.flags[block, group, 1] == zlib.crc32(data.data)
    with bench.home.lease(KEYS[:4]) as lease:
        assert lease.held == [True, True, True, False]
        for i in range(3):
            assert bytes(lease.view(i)) == blocks[i].tobytes()
            assert list(lease.crcs(i)) == bench.flags[i, :, 1].tolist()
    stream.close()
    assert bench.home.stats()["reserved"] == 0


def test_device_arrays_are_taken_as_they_come(bench):
    blocks = kv(2)
    stream = bench.stream(num_keys=2)
    for group in range(NUM_GROUPS):
        view = group_of(blocks, group).view(ml_dtypes.bfloat16)
        view.flags.writeable = False
        stream.add_new(GroupKV(group, 1, view), Z + 1)
    stream.finish()
    assert (bench.blocks[1] == blocks[0]).all()
    assert (bench.blocks[2][:, :, :, :1] == blocks[1][:, :, :, :1]).all()
    assert bench.home.exists(KEYS[:3]) == [False, True, False]
    stream.close()


def test_prefix_blocks_go_in_the_gaps_and_only_to_decode(bench):
    order, go = [], threading.Event()

    def gate(request) -> bool:
        assert go.wait(10)
        if request.local.nbytes >= FORMAT.group_nbytes:
            order.append((request.offset - 4096 - bench.layout.blocks_offset) // FORMAT.nbytes)
        return False

    bench.prefill.faults = Faults(only=gate)
    old, new = kv(3, seed=1), kv(1, seed=2)
    stream = bench.stream(first_block=3)
    whole = [block.reshape(-1).view(np.uint8) for block in old]
    crcs = [
        [zlib.crc32(block[g * FORMAT.group_nbytes :][: FORMAT.group_nbytes]) for g in (0, 1)]
        for block in whole
    ]
    stream.add_prefix(0, whole[:1], crcs[:1])
    stream.add_prefix(1, whole[1:2], crcs[1:2])
    stream.add_prefix(2, whole[2:], None)
    add_all(stream, new, Z, first_block=3)
    assert stream.pending_nbytes == 4 * FORMAT.nbytes
    go.set()
    stream.finish()
    assert sorted(order) == [0, 1, 2, 3, 3]
    assert order.index(3) <= 1
    assert order[-1] != 3, "new KV waited behind the prefix"
    assert (bench.blocks == np.concatenate([old, new])).all()
    assert bench.flags[:3, :, 1].tolist() == crcs
    assert bench.home.exists(KEYS[:4]) == [False, False, False, True]
    stream.close()


def test_a_flag_is_written_after_its_bytes(bench):
    seen = []

    def spy(request) -> bool:
        if request.local.nbytes < FORMAT.group_nbytes:  # flags are on their way: their data must be there
            row = np.frombuffer(request.local, "<u4").reshape(-1, NUM_GROUPS, 2)[0]
            for group in np.flatnonzero(row[:, 0]):
                part = np.ascontiguousarray(bench.blocks[0, 2 * group : 2 * group + 2])
                seen.append(zlib.crc32(part.data) == row[group, 1])
        return False

    bench.prefill.faults = Faults(only=spy)
    stream = bench.stream(num_keys=1)
    add_all(stream, kv(1), Z)
    stream.finish()
    stream.close()
    assert seen == [True] * (1 + 2)


def test_nothing_is_written_to_memory_that_may_be_anothers_soon(bench):
    bench.lease.renew(time.monotonic() - 3001.0)
    stream = bench.stream(num_keys=0)
    add_all(stream, kv(4), 4 * Z)
    with pytest.raises(UnavailableError, match="'decode-0' lends for 4000 s"):
        stream.finish()
    stream.close()
    again = bench.stream(num_keys=0, again=True)
    with pytest.raises(UnavailableError, match="reserve again"):
        again.finish()
    again.close()
    assert not bench.memory.any()


def test_bytes_that_took_too_long_are_not_flagged(bench):
    def over(request) -> bool:
        bench.lease.renew(time.monotonic() - 3001.0)
        return False

    bench.prefill.faults = Faults(only=over)
    stream = bench.stream(num_keys=0)
    add_all(stream, kv(1), Z)
    with pytest.raises(UnavailableError, match="reserve again"):
        stream.finish()
    stream.close()
    assert bench.blocks.any()
    assert not bench.flags.any()


def test_kv_that_arrives_renews_the_lease(bench):
    bench.lease.renew(time.monotonic() - 2000.0)
    stream = bench.stream(num_keys=0)
    add_all(stream, kv(1), Z)
    stream.finish()
    stream.close()
    bench.lease.check(time.monotonic() + 2000.0)


def test_a_stream_again_clears_the_flags_first(bench):
    first = bench.stream(num_keys=0)
    add_all(first, kv(4), 4 * Z)
    first.finish()
    first.close()
    assert (bench.flags[:, :, 0] == 9).all()
    again = bench.stream(num_keys=0, again=True)
    add_all(again, kv(1), Z)
    again.finish()
    again.close()
    assert (bench.flags[:, :, 0] == 9).sum(axis=1).tolist() == [NUM_GROUPS, 0, 0, 0]


def test_what_cannot_be_delivered_fails_the_stream_but_stays_at_home(bench):
    bench.prefill.faults = Faults(dead=True)
    stream = bench.stream(num_keys=1)
    blocks = kv(2)
    stream.add_new(GroupKV(0, 0, group_of(blocks, 0)), 2 * Z)
    with pytest.raises(UnavailableError, match="KV stream to decode instance 'decode-0'"):
        stream.finish()
    assert stream.failure is not None
    assert stream.pending_nbytes == 0
    stream.add_new(GroupKV(1, 0, group_of(blocks, 1)), 2 * Z)
    assert stream.pending_nbytes == 0
    stream.close()
    assert not bench.flags.any()
    assert bench.home.stats()["reserved"] == 0


def test_a_part_that_did_not_arrive_is_not_flagged(bench):
    bench.prefill.faults = Faults(dead=True, only=lambda request: request.local.nbytes >= FORMAT.group_nbytes)
    stream = bench.stream(num_keys=0)
    add_all(stream, kv(1), Z)
    with pytest.raises(UnavailableError):
        stream.finish()
    stream.close()
    assert not bench.flags.any()


def test_close_waits_for_the_write_on_its_way_and_drops_the_rest(bench):
    writing, go, closed = threading.Event(), threading.Event(), threading.Event()

    def gate(request) -> bool:
        writing.set()
        return not go.wait(10)

    bench.prefill.faults = Faults(only=gate)
    stream = bench.stream()
    add_all(stream, kv(4), 4 * Z)
    assert writing.wait(10)

    def close() -> None:
        stream.close()
        closed.set()

    closer = threading.Thread(target=close)
    closer.start()
    assert not closed.wait(0.05), "closed with a write in flight"
    go.set()
    closer.join(10)
    assert closed.is_set()
    assert bench.flags[:, 1].sum() == 0, "the second group was dropped"
    assert stream.pending_nbytes == 0
    assert bench.home.stats()["reserved"] == 0


def test_without_staging_only_the_home_node_gets_it(bench):
    stream = bench.stream(staging=False)
    add_all(stream, kv(4), 4 * Z)
    stream.add_prefix(0, [np.zeros(FORMAT.nbytes, np.uint8)])
    stream.finish()
    stream.close()
    assert stream.streamed_nbytes == 0
    assert not bench.memory.any()
    assert bench.home.exists(KEYS[:4]) == [True] * 4


def test_without_room_at_home_it_still_streams():
    bench = Bench(home_slots=2)
    blocks = kv(4)
    stream = bench.stream()
    add_all(stream, blocks, 4 * Z)
    stream.finish()
    stream.close()
    assert (bench.blocks == blocks).all()
    assert bench.home.exists(KEYS[:4]) == [True, True, False, False]
    bench.close()

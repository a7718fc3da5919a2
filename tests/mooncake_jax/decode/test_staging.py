"""Staging memory: lent once, verified, and never lent again while someone may still write to it."""

import zlib

import numpy as np
import pytest
from fakes.engine import FORMAT
from msgspec.structs import replace

from kvstore.errors import ExhaustedError, InternalError, InvalidError, NotFoundError, StaleError
from kvstore.transfer.segment import Peer, Segment
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.decode.staging import Staging
from mooncake_jax.staging_layout import StagingLayout

Z = FORMAT.block_tokens
PAGE = 4096
CONFIG = DecodeConfig(staging_nbytes=6 * PAGE, staging_lease_seconds=60.0, quarantine_seconds=15.0)
IDLE = {"staging_reserved": 0, "staging_taken": 0, "staging_resting": 0, "staging_nbytes": 0}


class Region:
    """The staging memory and someone who writes to it as prefill does."""

    def __init__(self):
        self.memory = np.full(CONFIG.staging_nbytes, 0xAB, np.uint8)
        segment = Segment(Peer(1, "here", []), "staging", self.memory.nbytes)
        self.staging = Staging("decode-0", 7, FORMAT, self.memory, segment, CONFIG)

    def write(self, handle, *, parts=None, fill=3, generation=None):
        """KV of `parts` (block, group), all by default, and their flags."""
        layout = StagingLayout(FORMAT, handle.num_blocks)
        every = [(b, g) for b in range(handle.num_blocks) for g in range(FORMAT.num_groups)]
        for block, group in every if parts is None else parts:
            data = np.full(FORMAT.group_nbytes, fill + block, np.uint8)
            start = handle.offset + layout.part_offset(block, group)
            self.memory[start : start + len(data)] = data
            flag = np.array([generation or handle.generation, zlib.crc32(data.data)], "<u4").view(np.uint8)
            start = handle.offset + block * layout.row_nbytes + group * 8
            self.memory[start : start + 8] = flag


@pytest.fixture
def region():
    return Region()


def test_a_handle_is_good_once_and_its_memory_comes_back(region):
    handle = region.staging.reserve("r", 3 * Z + 1, 0.0)
    assert (handle.instance, handle.epoch, handle.num_blocks) == ("decode-0", 7, 4)
    assert handle.lease_seconds == 60.0
    region.write(handle)
    kv = region.staging.take(handle, "r", 1.0)
    assert kv.is_complete
    kv.verify()
    assert kv.blocks.shape == (4, *FORMAT.shape)
    assert (kv.blocks[2] == 0x0505).all()
    with pytest.raises(StaleError, match="was used already"):
        region.staging.take(handle, "r", 1.0)
    region.staging.end(kv, 1.0)
    region.staging.end(kv, 1.0)
    assert region.staging.books(1.0) == IDLE
    with pytest.raises(StaleError, match="was used already"):
        region.staging.take(handle, "r", 1.0)


def test_flags_of_an_earlier_generation_do_not_count(region):
    old = region.staging.reserve("r", Z, 0.0)
    region.write(old)
    region.staging.end(region.staging.take(old, "r", 0.0), 0.0)
    new = region.staging.reserve("r", Z, 0.0)
    assert (new.slot, new.offset, new.generation) == (old.slot, old.offset, old.generation + 1)
    kv = region.staging.take(new, "r", 0.0)
    assert kv.num_arrived == 0
    region.write(new, generation=old.generation)
    assert kv.num_arrived == 0
    region.write(new, parts=[(0, 1)])
    assert kv.num_arrived == 1
    assert not kv.is_complete


def test_old_bytes_that_look_like_flags_do_not_count(region):
    region.memory.view("<u4")[:] = 1  # the first generation
    handle = region.staging.reserve("r", Z, 0.0)
    assert handle.generation == 1
    assert region.staging.take(handle, "r", 0.0).num_arrived == 0


@pytest.mark.parametrize("where", ["data", "crc"])
def test_damage_is_found(region, where):
    handle = region.staging.reserve("r", 2 * Z, 0.0)
    region.write(handle)
    layout = StagingLayout(FORMAT, 2)
    at = layout.part_offset(1, 1) + 5 if where == "data" else layout.row_nbytes + 8 + 4
    region.memory[handle.offset + at] ^= 1
    kv = region.staging.take(handle, "r", 0.0)
    assert kv.is_complete
    with pytest.raises(InternalError, match="block 1, layer group 1 arrived damaged"):
        kv.verify()


def test_memory_of_a_broken_off_stream_rests(region):
    handle = region.staging.reserve("r", Z, 0.0)
    region.write(handle, parts=[(0, 0)])
    region.staging.release(handle, 1.0)
    assert region.staging.books(15.9)["staging_resting"] == 1
    assert region.staging.reserve("r", Z, 15.9).offset != handle.offset
    assert region.staging.books(16.0)["staging_resting"] == 0
    assert region.staging.reserve("r", Z, 16.0).offset == handle.offset


def test_memory_is_free_as_soon_as_the_writer_is_seen_to_be_done(region):
    handle = region.staging.reserve("r", Z, 0.0)
    region.staging.release(handle, 0.0)
    assert region.staging.books(0.0)["staging_resting"] == 1
    region.write(handle)
    assert region.staging.books(0.1) == IDLE


def test_an_unused_reservation_ends_with_its_lease(region):
    handle = region.staging.reserve("r", Z, 0.0)
    assert region.staging.books(59.9)["staging_reserved"] == 1
    with pytest.raises(StaleError, match="was expired already"):
        region.staging.take(handle, "r", 60.0)
    assert region.staging.books(75.0) == IDLE


def test_a_long_stream_keeps_its_reservation_as_long_as_kv_arrives(region):
    handle = region.staging.reserve("r", 3 * Z, 0.0)
    region.write(handle, parts=[(0, 0)])
    assert region.staging.books(60.0)["staging_reserved"] == 1
    region.write(handle, parts=[(0, 1)])
    assert region.staging.books(120.0)["staging_reserved"] == 1
    assert region.staging.books(180.0)["staging_reserved"] == 0


def test_a_stream_that_begins_again_keeps_its_reservation(region):
    handle = region.staging.reserve("r", 3 * Z, 0.0)
    region.write(handle)
    assert region.staging.books(60.0)["staging_reserved"] == 1
    region.write(handle, generation=2**31)  # the flags of the first time are gone
    region.write(handle, parts=[(0, 0)])
    assert region.staging.books(120.0)["staging_reserved"] == 1
    assert region.staging.books(180.0)["staging_reserved"] == 0


def test_a_handle_is_good_for_its_own_request_only(region):
    handle = region.staging.reserve("mine", Z, 0.0)
    with pytest.raises(NotFoundError, match="not given out for request 'yours'"):
        region.staging.take(handle, "yours", 0.0)
    assert region.staging.num_refused == 1
    assert region.staging.take(handle, "mine", 0.0).handle == handle


def test_bad_handles_are_named_and_counted(region):
    handle = region.staging.reserve("r", 2 * Z, 0.0)
    bad = [
        (NotFoundError, replace(handle, slot=9)),
        (NotFoundError, replace(handle, generation=handle.generation + 1)),
        (NotFoundError, replace(handle, num_blocks=5)),
        (NotFoundError, replace(handle, offset=PAGE)),
        (NotFoundError, replace(handle, segment=replace(handle.segment, name="other"))),
        (StaleError, replace(handle, epoch=8)),
        (StaleError, replace(handle, instance="decode-1")),
    ]
    for i, (kind, wrong) in enumerate(bad, 1):
        with pytest.raises(kind):
            region.staging.take(wrong, "r", 0.0)
        assert region.staging.num_refused == i
    assert region.staging.take(handle, "r", 0.0).handle == handle
    newer = region.staging.reserve("r", 2 * Z, 0.0)
    with pytest.raises(StaleError):
        region.staging.take(replace(newer, generation=handle.generation), "r", 0.0)


def test_to_release_twice_is_an_error_but_no_failed_transfer(region):
    handle = region.staging.reserve("r", Z, 0.0)
    region.staging.release(handle, 0.0)
    with pytest.raises(StaleError, match="was released already"):
        region.staging.release(handle, 0.0)
    assert region.staging.num_refused == 0


def test_no_room_now_and_no_room_ever(region):
    first = region.staging.reserve("r", Z, 0.0)
    region.staging.reserve("r", Z, 0.0)
    region.staging.reserve("r", Z, 0.0)
    with pytest.raises(ExhaustedError, match="try again"):
        region.staging.reserve("r", Z, 0.0)
    with pytest.raises(InvalidError, match="there are 24576 in all"):
        region.staging.reserve("r", 400, 0.0)
    region.write(first)
    region.staging.release(first, 0.0)
    assert region.staging.reserve("r", Z, 0.0).offset == first.offset


def test_a_generation_is_never_zero():
    region = Region()
    region.staging._generation = 2**32 - 2
    assert [region.staging.reserve("r", Z, 0.0).generation for _ in range(2)] == [2**32 - 1, 1]

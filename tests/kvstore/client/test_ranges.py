"""Ranges of objects: one layer, one shard of the heads; from home, over TCP, through shared memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.block import BlockFormat
from kvstore.errors import InvalidError
from kvstore.transfer import Faults

FORMAT = BlockFormat(4, 2, 8, 4, "float32", 2)


@pytest.fixture
def blocks() -> tuple[list[bytes], list[np.ndarray]]:
    rng = np.random.default_rng(3)
    return [rng.bytes(16) for _ in range(3)], list(rng.random((3, *FORMAT.shape), np.float32))


@pytest.mark.parametrize("where", ["home", "shm", "tcp"])
def test_a_layer_and_a_shard_of_the_heads(cluster, blocks, where):
    keys, data = blocks
    store = cluster.node("a", slot_nbytes=FORMAT.nbytes)
    home = cluster.client(store)
    assert home.put(keys, data, FORMAT.group_nbytes) == ["stored"] * 3
    cluster.settle()
    client = home if where == "home" else cluster.client(host_id="host-a" if where == "shm" else "far")
    unknown = random.Random(1).randbytes(16)
    layer = client.get_ranges([*keys, unknown], [FORMAT.layer_range(2)])
    assert layer[:3] == [block[2].tobytes() for block in data]
    assert layer[3] is None
    into = [np.zeros((FORMAT.num_layers, 1, *FORMAT.shape[2:]), np.float32) for _ in keys]
    assert client.get_ranges_into(keys, FORMAT.heads_ranges(range(1, 2)), into) == [True] * 3
    assert all(np.array_equal(got, block[:, 1:2]) for got, block in zip(into, data, strict=True))
    group = (FORMAT.group_offset(1), FORMAT.group_nbytes)
    assert client.get_ranges(keys[:1], [group]) == [data[0][2:].tobytes()]


def test_ranges_that_cannot_be_are_refused(cluster, blocks):
    keys, data = blocks
    home = cluster.client(cluster.node("a", slot_nbytes=FORMAT.nbytes))
    home.put(keys, data, FORMAT.group_nbytes)
    cluster.settle()
    for client in (home, cluster.client()):
        for ranges in ([], [(-1, 5)], [(0, 0)], [(FORMAT.nbytes - 4, 5)]):
            with pytest.raises(InvalidError):
                client.get_ranges(keys, ranges)
        with pytest.raises(InvalidError, match="the ranges together 8"):
            client.get_ranges_into(keys[:1], [(0, 8)], [bytearray(9)])
    for heads in (range(2, 3), range(0, 2, 2), range(0)):
        with pytest.raises(IndexError):
            FORMAT.heads_ranges(heads)
    with pytest.raises(IndexError):
        FORMAT.layer_range(4)


def test_a_corrupted_range_of_whole_parts_is_not_returned(cluster, blocks):
    keys, data = blocks
    cluster.client(cluster.node("a", slot_nbytes=FORMAT.nbytes)).put(keys, data, FORMAT.group_nbytes)
    cluster.settle()
    client = cluster.client(faults=Faults(corrupt_byte=5))
    assert client.get_ranges(keys, [(FORMAT.group_offset(1), FORMAT.group_nbytes)]) == [None] * 3
    assert client.counters()["corrupt"] == 3

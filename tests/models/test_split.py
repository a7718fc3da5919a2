"""Splitting a step over devices: everyone has the same causal work, and every gather undoes its split."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from models import split


@pytest.mark.parametrize(("tile", "num_devices"), [(16, 1), (16, 2), (32, 4), (48, 2)])
def test_every_row_is_dealt_once_and_causal_work_is_equal(tile, num_devices):
    order = split.dealt(tile, num_devices)
    assert sorted(order) == list(range(tile))
    work = (order + 1).reshape(num_devices, -1).sum(axis=1)
    assert len(set(work)) == 1


def test_a_tile_that_does_not_cut_is_refused():
    with pytest.raises(ValueError, match="10 tokens does not cut into 4"):
        split.dealt(10, 2)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_devices_know_their_offsets_and_gather_in_the_order_of_the_prompt(num_devices):
    tile = 16
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (split.AXIS,))
    part, whole = PartitionSpec(split.AXIS), PartitionSpec()
    order = split.dealt(tile, num_devices)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=part, out_specs=(part, whole), check_vma=False)
    def step(x):
        firsts = split.first_offsets(x.shape[0], num_devices)
        offsets = jax.numpy.concatenate([first + np.arange(x.shape[0] // len(firsts)) for first in firsts])
        return offsets, split.gather_rows(x, num_devices)

    offsets, gathered = jax.jit(step)(order)
    assert offsets.tolist() == order.tolist()
    assert gathered.tolist() == list(range(tile))


def test_shares_of_gate_up_hold_gate_and_up_of_the_same_columns():
    gate, up = np.arange(4), np.arange(4) + 10
    layer = {"gate_up": np.concatenate([gate, up])[:, None], "attn_norm": np.ones(3)}
    shared = split.share_columns([layer], 2)[0]
    assert shared["gate_up"][:, 0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_a_weight_that_does_not_cut_is_refused():
    with pytest.raises(ValueError, match="qkv: 5 rows do not cut into 2"):
        split.share_columns([{"qkv": np.zeros((5, 2), np.float32)}], 2)


@pytest.mark.parametrize(
    ("most", "tiles", "rows", "expected"),
    [(8, [16, 32], 64, 8), (8, [16, 24], 64, 4), (4, [16], 6, 2), (2, [16], 5, 1), (1, [3], 5, 1)],
)
def test_devices_are_as_many_as_tiles_and_weights_cut_into(most, tiles, rows, expected):
    layer = {"qkv": np.zeros((rows, 2)), "gate_up": np.zeros((2 * rows, 2)), "attn_norm": np.zeros(3)}
    assert split.fitting_devices(most, tiles, layer) == expected

"""Dealing a tile's rows to devices: everyone has the same causal work, and the prompt's order comes back."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from models import rows


@pytest.mark.parametrize(("tile", "num_devices"), [(16, 1), (16, 2), (32, 4), (48, 2)])
def test_every_row_is_dealt_once_and_causal_work_is_equal(tile, num_devices):
    order = rows.dealt(tile, num_devices)
    assert sorted(order) == list(range(tile))
    work = (order + 1).reshape(num_devices, -1).sum(axis=1)
    assert len(set(work)) == 1


def test_a_tile_that_does_not_cut_is_refused():
    with pytest.raises(ValueError, match="10 tokens does not cut into 4"):
        rows.dealt(10, 2)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_devices_know_their_offsets_and_gather_in_the_order_of_the_prompt(num_devices):
    tile = 16
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (rows.AXIS,))
    part, whole = PartitionSpec(rows.AXIS), PartitionSpec()
    order = rows.dealt(tile, num_devices)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=part, out_specs=(part, whole), check_vma=False)
    def step(x):
        firsts = rows.first_offsets(x.shape[0], num_devices)
        offsets = jax.numpy.concatenate([first + np.arange(x.shape[0] // len(firsts)) for first in firsts])
        return offsets, rows.gather(x, num_devices)

    offsets, gathered = jax.jit(step)(order)
    assert offsets.tolist() == order.tolist()
    assert gathered.tolist() == list(range(tile))

"""Splitting a step over devices: everyone has the same causal work, and every gather undoes its split."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from models import split
from models.llama import Param


@pytest.mark.parametrize(("tile", "num_devices"), [(16, 1), (16, 2), (32, 4), (48, 2)])
def test_every_row_is_dealt_once_and_causal_work_is_equal(tile, num_devices):
    order = split.ByRows(num_devices).dealt(tile)
    assert sorted(order) == list(range(tile))
    work = (order + 1).reshape(num_devices, -1).sum(axis=1)
    assert len(set(work)) == 1


def test_a_tile_that_does_not_cut_is_refused():
    with pytest.raises(ValueError, match="10 tokens does not cut into 4"):
        split.ByRows(2).dealt(10)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_devices_know_their_offsets_and_gather_in_the_order_of_the_prompt(num_devices):
    tile = 16
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (split.AXIS,))
    part, whole = PartitionSpec(split.AXIS), PartitionSpec()
    order = split.ByRows(num_devices).dealt(tile)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=part, out_specs=(part, whole), check_vma=False)
    def step(x):
        how = split.ByRows(num_devices)
        return how.offsets(x.shape[0]), how.gather_tile(x)

    offsets, gathered = jax.jit(step)(order)
    assert offsets.tolist() == order.tolist()
    assert gathered.tolist() == list(range(tile))


MATRIX, FUSED = Param((4, 1), ("heads", "embed")), Param((8, 1), ("mlp", "embed"), fused=2)
DOWN, NORM = Param((3, 4), ("embed", "mlp")), Param((3,), (None,))


def test_shares_of_fused_matrices_stand_side_by_side():
    gate, up = np.arange(4), np.arange(4) + 10
    params = {"gate_up": np.concatenate([gate, up])[:, None], "out": gate[:, None], "norm": np.ones(3)}
    shared = split.share_columns({"gate_up": FUSED, "out": MATRIX, "norm": NORM}, params, 2)
    assert shared["gate_up"][:, 0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert shared["out"][:, 0].tolist() == [0, 1, 2, 3]


def test_a_weight_that_does_not_cut_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5, 2\) does not cut into 2"):
        split.share_columns(MATRIX, np.zeros((5, 2), np.float32), 2)
    with pytest.raises(ValueError, match=r"shape \(3, 5\) does not cut into 2"):
        split.share_columns(DOWN, np.zeros((3, 5), np.float32), 2)


@pytest.mark.parametrize(
    ("most", "tiles", "rows", "expected"),
    [(8, [16, 32], 64, 8), (8, [16, 24], 64, 4), (4, [16], 6, 2), (2, [16], 5, 1), (1, [3], 5, 1)],
)
def test_devices_are_as_many_as_tiles_and_weights_cut_into(most, tiles, rows, expected):
    matrix, fused = Param((rows, 2), ("heads", None)), Param((2 * rows, 2), ("mlp", None), fused=2)
    assert split.fitting_devices(most, tiles, [matrix, fused, NORM]) == expected
    down = Param((3, rows), ("embed", "mlp"))
    assert split.fitting_devices(most, tiles, [down, NORM]) == expected

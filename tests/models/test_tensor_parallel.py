"""A decode step over devices that share the heads equals the step of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from models import cache, llama, rope, tensor_parallel
from models.config import preset
from models.platform import CPU
from models.sharding import MeshShape
from models.split import ByHeads

CFG = dataclasses.replace(
    preset("tiny"),
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    attention_bias=True,
    mlp_bias=True,
    max_position=64,
)
PARAMS = llama.init_params(CFG, 0, "float32")["layers"]
BATCH = 3


def test_decode_over_heads_equals_one_device():
    rng = np.random.default_rng(0)
    shape = cache.pages_shape(CFG, BATCH, 16)
    pages = [rng.standard_normal(shape, np.float32) for _ in range(CFG.num_layers)]
    x = rng.standard_normal((BATCH, CFG.d_model), np.float32)
    positions, active = np.array([0, 17, 200], np.int32), np.array([True, False, True])
    alone = jax.jit(functools.partial(llama.decode_group, CFG, CPU, ByHeads(1)))
    rotation = rope.rotation(CFG, positions)
    expected_x, expected_pages = alone(PARAMS, x, rotation, pages, positions, active)
    mesh = MeshShape(tensor=4).make()
    table = llama.param_table(CFG)["layers"]
    layers = tensor_parallel.place(table, mesh, PARAMS)
    step = jax.jit(tensor_parallel.decode_group(CFG, CPU, mesh))
    got_x, got_pages = step(layers, x, rotation, pages, positions, active)
    np.testing.assert_allclose(got_x[active], expected_x[active], atol=1e-4)
    for got, expected in zip(got_pages, expected_pages, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    assert not np.allclose(expected_pages[0][0, 0, :, :, 0], pages[0][0, 0, :, :, 0])


def test_a_mesh_with_stages_is_refused():
    with pytest.raises(ValueError, match="over tensor alone"):
        tensor_parallel.decode_group(CFG, CPU, MeshShape(stage=2).make())

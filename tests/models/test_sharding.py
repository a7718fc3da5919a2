import dataclasses

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import llama, sharding
from models.config import preset
from models.llama import Param
from models.sharding import MeshShape


def test_a_mesh_is_read_from_text_and_written_back():
    assert MeshShape.parse("stage:4,tensor:2") == MeshShape(stage=4, tensor=2)
    assert MeshShape.parse("") == MeshShape()
    assert str(MeshShape(stage=4, tensor=2)) == "stage:4,tensor:2"


@pytest.mark.parametrize("text", ["stages:2", "stage", "stage:2,stage:2", "tensor:-1", "stage:x"])
def test_text_that_is_no_mesh_is_refused(text):
    with pytest.raises(ValueError, match="expected AXIS:SIZE"):
        MeshShape.parse(text)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (MeshShape(stage=3), "32 layers do not divide over stage:3"),
        (MeshShape(tensor=16), "8 KV heads do not divide over tensor:16"),
        (MeshShape(tensor=3), "8 KV heads do not divide over tensor:3"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_the_model_is_refused_with_the_reason(shape, reason):
    with pytest.raises(ValueError, match=reason):
        shape.check(preset("llama3-8b"))


def test_too_few_devices_are_named():
    with pytest.raises(ValueError, match=r"stage:64: 64 devices are needed, there are \d+"):
        MeshShape(stage=64).make()


def test_every_share_of_fused_rows_has_its_heads_of_q_k_and_v():
    param = Param((8, 1), ("heads", "embed"), parts=(4, 2, 2))
    assert sharding.row_order(param, 2).tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    with pytest.raises(ValueError, match=r"matrices of \(4, 2, 2\) rows do not divide over tensor:4"):
        sharding.row_order(param, 4)


def test_rows_that_are_not_cut_stay():
    assert sharding.row_order(Param((3,), (None,)), 2).tolist() == [0, 1, 2]
    assert sharding.row_order(Param((3, 4), ("embed", "heads")), 2).tolist() == [0, 1, 2]


def test_all_axes_of_every_parameter_are_in_the_table():
    cfg = dataclasses.replace(preset("llama3-70b"), attention_bias=True, mlp_bias=True)
    found = sharding.specs(llama.param_table(cfg))
    assert found["lm_head"] == PartitionSpec("tensor", None)
    assert found["embed"] == PartitionSpec(None, None)
    assert found["layers"][3]["qkv_bias"] == PartitionSpec("tensor")
    assert found["layers"][3]["down"] == PartitionSpec(None, "tensor")
    assert np.all([spec is not None for spec in found["layers"][0].values()])

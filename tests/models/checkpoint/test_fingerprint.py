"""The fingerprint changes with anything that changes what the model computes, and with nothing else."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models.checkpoint import weights_fingerprint
from models.config import RopeScaling, preset
from models.llama import init_params

CFG = preset("tiny")
PARAMS = init_params(CFG, seed=3, dtype="float32")
BASE = weights_fingerprint(CFG, PARAMS)


def test_it_is_the_same_in_every_process_and_placement():
    fixed = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3), "layers": [{"out": np.ones(4, np.int8)}]}
    assert weights_fingerprint(CFG, fixed).hex() == "8efe93aac8047e4d16c2143902dbfd2e"
    assert weights_fingerprint(CFG, jax.tree.map(jax.device_put, PARAMS)) == BASE
    strided = {**PARAMS, "embed": np.asfortranarray(PARAMS["embed"])}
    assert weights_fingerprint(CFG, strided) == BASE


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10_001.0},
        {"norm_eps": 1e-6},
        {"rope_scaling": RopeScaling("linear", 2.0)},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 60},
    ],
)
def test_it_changes_with_the_config(change):
    assert weights_fingerprint(replace(CFG, **change), PARAMS) != BASE


@pytest.mark.parametrize("change", [{"block_tokens": 64}, {"layers_per_group": 1}, {"max_position": 64}])
def test_it_does_not_change_with_how_serving_cuts_the_model(change):
    assert weights_fingerprint(replace(CFG, **change), PARAMS) == BASE


def test_it_changes_with_biases():
    cfg = replace(CFG, attention_bias=True)
    params = init_params(cfg, seed=3, dtype="float32")
    base = weights_fingerprint(cfg, params)
    params["layers"][0]["out_bias"][0] += 1
    assert len({BASE, base, weights_fingerprint(cfg, params)}) == 3


def test_it_changes_with_one_bit_anywhere():
    seen = {BASE}
    leaves, structure = jax.tree.flatten(PARAMS)
    for index, leaf in enumerate(leaves):
        changed = leaf.copy()
        changed.reshape(-1).view(np.uint8)[-1] ^= 1
        seen.add(
            weights_fingerprint(CFG, structure.unflatten([*leaves[:index], changed, *leaves[index + 1 :]]))
        )
    assert len(seen) == len(leaves) + 1


def test_it_changes_with_names_shapes_and_dtypes():
    embed = PARAMS["embed"]
    others = [
        {**PARAMS, "final_norm": embed, "embed": PARAMS["final_norm"]},
        {**PARAMS, "embed": embed.reshape(embed.shape[1], -1)},
        {**PARAMS, "embed": embed.view(np.int32)},
        {**PARAMS, "layers": PARAMS["layers"][::-1]},
    ]
    assert len({BASE, *(weights_fingerprint(CFG, other) for other in others)}) == 5

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import llama, sharding
from models.config import PRESETS, preset

CFG = preset("tiny")


def test_the_table_has_the_published_number_of_parameters():
    def count(name):
        return sum(
            int(np.prod(leaf.shape))
            for leaf in jax.tree.leaves(llama.abstract_params(PRESETS[name], "bfloat16"))
        )

    assert count("smollm2-135m") == 134_515_008
    assert count("llama3-8b") == 8_030_261_248
    assert count("llama3-70b") == 70_553_706_496


def test_lm_head_exists_only_untied():
    assert "lm_head" not in llama.param_table(CFG)
    assert "lm_head" in llama.param_table(preset("llama3-8b"))


def test_init_is_deterministic_and_passes_its_own_check():
    one, two = llama.init_params(CFG, 3, "float32"), llama.init_params(CFG, 3, "float32")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))
    llama.check_params(CFG, one, "float32")


def test_check_params_names_what_is_wrong():
    params = llama.init_params(CFG, 0, "float32")
    with pytest.raises(ValueError, match=r"layers.*embed.*bfloat16|embed.*bfloat16"):
        llama.check_params(CFG, params, "bfloat16")
    with pytest.raises(ValueError, match=r"missing.*final_norm"):
        llama.check_params(CFG, {k: v for k, v in params.items() if k != "final_norm"}, "float32")
    with pytest.raises(ValueError, match=r"does not have.*lm_head"):
        llama.check_params(CFG, {**params, "lm_head": params["embed"]}, "float32")
    with pytest.raises(ValueError, match=r"final_norm.*\(72,\).*\(71,\)"):
        llama.check_params(CFG, {**params, "final_norm": params["final_norm"][:-1]}, "float32")


def test_one_early_prompt_token_moves_the_logits():
    """Otherwise equal outputs would prove nothing about KV: ≥ 95 of 100 trials move by > 10 tolerances."""
    params = jax.tree.map(jnp.asarray, llama.init_params(CFG, 0, "float32"))
    last = jax.jit(lambda tokens: jax.nn.log_softmax(llama.dense_logits(CFG, params, tokens)[-1]))
    rng = np.random.default_rng(0)
    moved = 0
    for _ in range(100):
        tokens = rng.integers(0, CFG.vocab_size, 100).astype(np.int32)
        other = tokens.copy()
        other[rng.integers(0, 10)] ^= 1
        other %= CFG.vocab_size
        moved += float(jnp.abs(last(tokens) - last(other)).max()) > 10 * 1e-3
    assert moved >= 95


def test_dense_reference_is_causal():
    params = llama.init_params(CFG, 0, "float32")
    logits = jax.jit(functools.partial(llama.dense_logits, CFG))
    tokens = np.arange(20, dtype=np.int32)
    longer = np.concatenate([tokens, tokens])[:30]
    np.testing.assert_allclose(logits(params, tokens), logits(params, longer)[:20], atol=1e-4)


def test_partition_specs_follow_the_one_table():
    assert sharding.partition_spec(("heads", "embed")) == PartitionSpec("tensor", None)
    with pytest.raises(ValueError, match="used twice"):
        sharding.partition_spec(("heads", "mlp"))
    with pytest.raises(ValueError, match="'batch'"):
        sharding.partition_spec(("batch",))


def test_every_parameter_has_a_sharding():
    mesh = sharding.MeshShape().make()
    shardings = sharding.param_shardings(CFG, mesh)
    assert shardings["layers"][0]["down"].spec == PartitionSpec(None, "tensor")
    placed = jax.tree.map(jax.device_put, llama.init_params(CFG, 0, "float32"), shardings)
    assert placed["embed"].shape == (CFG.vocab_size, CFG.d_model)

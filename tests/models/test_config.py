import dataclasses

import pytest

from models.config import PRESETS, RopeScaling, preset


def test_presets_are_hashable_and_known_by_name():
    assert {hash(cfg) for cfg in PRESETS.values()} == {hash(preset(name)) for name in PRESETS}
    with pytest.raises(ValueError, match="smollm2-135m"):
        preset("gpt")


def test_smollm2_has_the_published_sizes():
    cfg = preset("smollm2-135m")
    assert (cfg.vocab_size, cfg.d_model, cfg.d_ff, cfg.num_layers) == (49_152, 576, 1536, 30)
    assert (cfg.num_heads, cfg.num_kv_heads, cfg.queries_per_kv, cfg.num_groups) == (9, 3, 3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 4}, "6 query heads"),
        ({"head_dim": 7}, "even"),
        ({"layers_per_group": 3}, "groups of 3"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"d_ff": 1.5}, "d_ff"),
        ({"num_layers": True}, "num_layers"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"rope_theta": 1.0}, "rope_theta"),
    ],
)
def test_a_wrong_size_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(preset("tiny"), **change)


@pytest.mark.parametrize(
    "change",
    [{"kind": "yarn"}, {"factor": 0.5}, {"low_freq_factor": 5.0}, {"original_max_position": 0}],
)
def test_wrong_rope_scaling_is_refused(change):
    with pytest.raises(ValueError, match=r"RoPE|rope|original_max_position"):
        dataclasses.replace(RopeScaling("llama3", factor=8.0), **change)

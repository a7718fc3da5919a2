"""The steps of the real sizes lower for CUDA on a mesh of 8 devices, and what lies on one of them fits."""

import dataclasses

import jax
import pytest

from models import lowering
from models.collectives import collectives, sent_elements
from models.config import PRESETS, LlamaConfig
from models.platform import ACCELERATOR, CPU
from models.sharding import MeshShape

GPU_NBYTES = 80 * 10**9  # A800 and H800
CHUNK, LONG = 8192, 131_072


def shallow(name: str) -> LlamaConfig:
    """A real size with one layer on each of 8 stages: a step's lowering repeats itself for every further layer."""
    return dataclasses.replace(PRESETS[name], num_layers=8, layers_per_group=1)


def head(cfg: LlamaConfig, mesh, rows: int) -> lowering.Step:
    return lowering.head(cfg, ACCELERATOR, mesh, dtype="bfloat16", rows=rows)


def prefill(cfg: LlamaConfig, mesh) -> lowering.Step:
    return lowering.prefill_tick(
        cfg, ACCELERATOR, mesh, dtype="bfloat16", chunk_tokens=CHUNK, num_slots=2, max_tokens=LONG
    )


def decode(cfg: LlamaConfig, mesh) -> lowering.Step:
    return lowering.decode_group(cfg, ACCELERATOR, mesh, dtype="bfloat16", batch=32, max_tokens=8192)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_every_step_lowers_for_cuda(name):
    cfg = shallow(name)
    cpp, tensor = MeshShape(stage=4, tensor=2).abstract(), MeshShape(tensor=8).abstract()
    steps = {
        "collective_permute": prefill(dataclasses.replace(cfg, num_layers=4), cpp),
        "all_reduce": decode(cfg, tensor),
        "all_gather": lowering.prefill_by_rows(
            cfg, ACCELERATOR, 8, dtype="bfloat16", chunk_tokens=CHUNK, max_tokens=LONG
        ),
        "dot_general": head(cfg, tensor, rows=32),
    }
    for operation, step in steps.items():
        lowered = step.export("cuda")
        assert lowered.platforms == ("cuda",)
        assert lowered.nr_devices == 8
        text = lowered.mlir_module()
        assert f"stablehlo.{operation}" in text
        assert "bf16" in text


def test_70b_fits_eight_gpus():
    cfg = PRESETS["llama3-70b"]
    cpp, tensor = MeshShape(stage=4, tensor=2).abstract(), MeshShape(tensor=8).abstract()
    before = lowering.prefill_memory(cfg, ACCELERATOR, prefill(cfg, cpp), head(cfg, cpp, 1))
    after = lowering.decode_memory(cfg, ACCELERATOR, decode(cfg, tensor), head(cfg, tensor, 32))
    layers = 80 * 855_654_400 // 8 * 2  # bytes of a layer's weights, without its norms, in bfloat16
    assert before.parameters > layers
    assert after.kv == 32 * 8192 * 80 * 2 * 128 * 2  # one of the 8 KV heads
    assert before.kv == 2 * (LONG + CHUNK) * 20 * 4 * 2 * 128 * 2  # 20 layers, 4 KV heads
    assert max(before.total, after.total) < 0.9 * GPU_NBYTES


def test_the_estimate_of_temporaries_is_near_what_xla_plans():
    """In float32 on the CPU, for a size at which the large arrays matter."""
    cfg = dataclasses.replace(
        shallow("llama3-8b"), d_model=1024, d_ff=3584, num_heads=8, num_kv_heads=4, num_layers=1
    )
    platform = dataclasses.replace(ACCELERATOR, name="cpu", attention_rows=512)
    mesh = MeshShape().make()
    step = lowering.prefill_tick(
        cfg, platform, mesh, dtype="float32", chunk_tokens=1024, num_slots=1, max_tokens=2048
    )
    planned = step.jitted().lower(*step.args).compile().memory_analysis().temp_size_in_bytes
    estimate = lowering.prefill_temporaries(cfg, platform, 1024, 1, 4)
    assert 0.5 < planned / estimate < 2.0


def small(num_layers: int) -> LlamaConfig:
    return dataclasses.replace(
        PRESETS["tiny"],
        num_layers=num_layers,
        layers_per_group=num_layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
    )


def test_what_crosses_is_what_the_arithmetic_says():
    chunk, n = 64, 4
    cfg, sizes = small(4), {"dtype": "float32", "chunk_tokens": 64, "max_tokens": 128}

    def compiled(step: lowering.Step) -> str:
        return step.jitted().lower(*step.args).compile().as_text()

    cpp = compiled(lowering.prefill_tick(cfg, CPU, MeshShape(stage=n).make(), num_slots=1, **sizes))
    assert [c.kind for c in collectives(cpp)] == ["collective-permute"]
    assert sent_elements(cpp) == chunk * cfg.d_model
    one = small(1)
    tensor = compiled(lowering.prefill_tick(one, CPU, MeshShape(tensor=n).make(), num_slots=1, **sizes))
    assert [c.kind for c in collectives(tensor)] == ["all-reduce"] * 2
    assert sent_elements(tensor) == 2 * chunk * cfg.d_model * 2 * (n - 1) / n
    rows = compiled(lowering.prefill_by_rows(one, CPU, jax.devices()[:n], **sizes))
    assert [c.kind for c in collectives(rows)] == ["all-gather"]
    assert sent_elements(rows) == chunk * 2 * cfg.num_kv_heads * cfg.head_dim * (n - 1) / n


def test_other_spellings_of_collectives_are_read():
    text = """
  %a = (f32[8,2]{1,0}, f32[4]{0}) all-reduce(%x, %y), replica_groups=[2,4]<=[8], to_apply=%add
  %b = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %c = f32[8]{0} add(%all-reduce.1, %b)
"""
    found = collectives(text)
    assert [(c.kind, c.num_elements, c.num_devices) for c in found] == [
        ("all-reduce", 20, 4),
        ("reduce-scatter", 2, 2),
    ]
    assert [c.sent_elements for c in found] == [30.0, 2.0]
    with pytest.raises(ValueError, match="without replica groups"):
        collectives("%a = f32[8]{0} all-gather(%x), dimensions={0}")

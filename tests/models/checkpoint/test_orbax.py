"""Our checkpoints: equal values under any placement, whole or not at all, and damage is named."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from golden.values import TINY_LLAMA

from models.checkpoint import CheckpointError, Model, load_model, save_checkpoint
from models.checkpoint.orbax import MANIFEST_FILE
from models.config import preset
from models.llama import init_params

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tiny() -> Model:
    cfg = replace(preset("tiny"), tie_embeddings=False)
    return Model(cfg, init_params(cfg, seed=1, dtype="bfloat16"), None, "bfloat16")


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    save_checkpoint(path, tiny)
    return path


def same_bits(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype for x, y in leaves)


def test_what_was_saved_is_loaded_bit_for_bit(tiny, saved):
    loaded = load_model(saved)
    assert (loaded.cfg, loaded.dtype, loaded.tokenizer) == (tiny.cfg, "bfloat16", None)
    assert same_bits(loaded.params, tiny.params)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(loaded.params))
    assert loaded.fingerprint == tiny.fingerprint


def test_config_and_tokenizer_travel_with_the_weights(tmp_path):
    model = load_model(TINY_LLAMA, dtype="float32")
    save_checkpoint(tmp_path / "c", model)
    loaded = load_model(tmp_path / "c")
    assert loaded.cfg == model.cfg  # rope scaling included
    assert loaded.dtype == "float32"
    assert loaded.tokenizer is not None
    assert model.tokenizer is not None
    assert loaded.tokenizer.settings == model.tokenizer.settings
    assert loaded.tokenizer.encode("Hello 😀") == model.tokenizer.encode("Hello 😀")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_is_cast_and_has_its_own_fingerprint(saved, tiny, dtype):
    loaded = load_model(saved, dtype=dtype)
    expected = jax.tree.map(lambda leaf: leaf.astype(loaded.params["embed"].dtype), tiny.params)
    assert same_bits(loaded.params, expected)
    assert (loaded.fingerprint == tiny.fingerprint) == (dtype == "bfloat16")


def test_a_placement_is_ours(saved, tiny):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for shardings in (place, jax.tree.map(lambda leaf: place, tiny.params)):
        loaded = load_model(saved, shardings=shardings)
        assert all(leaf.sharding == place for leaf in jax.tree.leaves(loaded.params))
        assert same_bits(loaded.params, tiny.params)
    with pytest.raises(ValueError, match="tree of shardings"):
        load_model(saved, shardings={"embed": place})


SAVE_ON_EIGHT = """
import jax, sys
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models.checkpoint import load_model, save_checkpoint
from models.sharding import param_shardings
mesh = Mesh(jax.devices(), ("x",))
def place(leaf):
    return NamedSharding(mesh, P(None, "x") if leaf.ndim == 2 and leaf.shape[1] % 8 == 0 else P())
plain = load_model(sys.argv[1])
spread = load_model(sys.argv[1], shardings=jax.tree.map(place, plain.params))
assert len(spread.params["embed"].sharding.device_set) == 8
assert spread.fingerprint == plain.fingerprint
save_checkpoint(sys.argv[2], spread)
def parallel(num):
    return Mesh(jax.devices()[:num], ("tensor",))
layouts = {
    "2 copies": (2, NamedSharding(parallel(2), P())),
    "4 copies": (4, NamedSharding(parallel(4), P())),
    "tensor parallel 2": (2, param_shardings(plain.cfg, parallel(2))),
    "tensor parallel 4": (4, param_shardings(plain.cfg, parallel(4))),
}
for name, (num, shardings) in layouts.items():
    again = load_model(sys.argv[2], shardings=shardings)
    assert len(again.params["embed"].sharding.device_set) == num, name
    assert again.fingerprint == plain.fingerprint, name
    wide = load_model(sys.argv[2], shardings=shardings, dtype="float32").params["layers"][0]["qkv"]
    np.testing.assert_array_equal(wide, plain.params["layers"][0]["qkv"].astype(np.float32))
half = load_model(sys.argv[2], shardings=param_shardings(plain.cfg, parallel(2))).params["layers"][0]["qkv"]
assert half.addressable_shards[0].data.shape[0] * 2 == half.shape[0]
"""


def test_saved_on_eight_devices_restores_under_any_layout(tmp_path):
    cfg = replace(preset("tiny"), vocab_size=516, num_heads=8, num_kv_heads=4, head_dim=8)
    model = Model(cfg, init_params(cfg, seed=1, dtype="bfloat16"), None, "bfloat16")
    save_checkpoint(tmp_path / "one", model)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", SAVE_ON_EIGHT, str(tmp_path / "one"), str(tmp_path / "eight")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    loaded = load_model(tmp_path / "eight")
    assert same_bits(loaded.params, model.params)
    assert loaded.fingerprint == model.fingerprint


def test_biases_are_saved_and_an_older_manifest_means_none(tmp_path):
    cfg = replace(preset("tiny"), attention_bias=True, mlp_bias=True)
    model = Model(cfg, init_params(cfg, seed=1, dtype="float32"), None, "float32")
    save_checkpoint(tmp_path / "biased", model)
    loaded = load_model(tmp_path / "biased")
    assert loaded.cfg == cfg
    assert same_bits(loaded.params, model.params)
    manifest = tmp_path / "biased" / MANIFEST_FILE
    fields = json.loads(manifest.read_text())
    del fields["config"]["attention_bias"], fields["config"]["mlp_bias"]
    manifest.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"16 parameters .* no place for: layers/0/down_bias"):
        load_model(tmp_path / "biased")


def test_a_restore_in_many_steps_is_the_same_and_tells_how_far_it_is(saved, tiny, monkeypatch):
    monkeypatch.setattr("models.checkpoint.orbax._MIN_BATCH_NBYTES", 1)
    steps: list[tuple[int, int]] = []
    loaded = load_model(saved, on_progress=lambda done, total: steps.append((done, total)))
    assert same_bits(loaded.params, tiny.params)
    assert len(steps) > 4
    assert steps == sorted(set(steps))
    assert steps[-1][0] == steps[-1][1] == sum(leaf.nbytes for leaf in jax.tree.leaves(tiny.params))


def test_a_relative_path_works(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint("here", tiny)
    assert load_model("here").fingerprint == tiny.fingerprint


def test_a_target_that_exists_is_left_alone(saved, tiny):
    before = sorted(p.name for p in saved.parent.iterdir())
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(saved, tiny)
    assert sorted(p.name for p in saved.parent.iterdir()) == before


@pytest.mark.parametrize("step", ["params", "rename"])
def test_a_save_that_fails_leaves_nothing(tiny, tmp_path, monkeypatch, step):
    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    target = "orbax.checkpoint.Checkpointer.save" if step == "params" else "pathlib.Path.rename"
    monkeypatch.setattr(target, fail)
    with pytest.raises((OSError, CheckpointError), match="No space"):
        save_checkpoint(tmp_path / "c", tiny)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_manifest_is_no_checkpoint(saved, tmp_path):
    (tmp_path / "params").mkdir()
    with pytest.raises(CheckpointError, match=f"neither {MANIFEST_FILE}"):
        load_model(tmp_path)


def test_parameters_that_do_not_fit_the_config_are_not_saved(tiny, tmp_path):
    params = dict(tiny.params)
    del params["final_norm"]
    with pytest.raises(CheckpointError, match="final_norm"):
        save_checkpoint(tmp_path / "c", replace(tiny, params=params))


def copy_with(saved: Path, target: Path, **changes) -> Path:
    """The checkpoint with a changed manifest; `config` entries are merged into the config."""
    target.mkdir()
    (target / "params").symlink_to(saved / "params")
    manifest = json.loads((saved / MANIFEST_FILE).read_text())
    manifest["config"] |= changes.pop("config", {})
    manifest |= changes
    (target / MANIFEST_FILE).write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config": {"num_layers": 5, "layers_per_group": 1}},
            r"6 parameters are missing: layers/4/attn_norm",
        ),
        ({"config": {"num_layers": 3, "layers_per_group": 1}}, r"6 parameters .* no place for: layers/3"),
        ({"config": {"tie_embeddings": True}}, r"no place for: lm_head"),
        ({"config": {"vocab_size": 514}}, r"embed has shape \(515, 72\), the config asks for \(514, 72\)"),
        ({"config": {"colour": 1}}, "config: .*colour"),
        ({"config": {"num_heads": -1}}, "config: num_heads"),
        ({"format": 99}, "format 99; this version reads 1"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"fingerprint": None}, "fields missing: fingerprint"),
        ({"fingerprint": "00" * 16}, "the checkpoint is damaged"),
    ],
)
def test_a_manifest_that_disagrees_is_named(saved, tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(copy_with(saved, tmp_path / "c", **changes))


def test_damaged_weights_are_found(tiny, tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, tiny)
    largest = max((path / "params").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"damaged|cannot be restored"):
        load_model(path)


def test_how_serving_cuts_a_model_does_not_change_its_identity(saved, tmp_path):
    path = copy_with(saved, tmp_path / "c", config={"block_tokens": 64, "max_position": 1024})
    assert load_model(path).cfg.block_tokens == 64

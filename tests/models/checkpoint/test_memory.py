"""What a load needs at its peak, measured in a process of its own: less than 1.3 times its result."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from golden.folders import gguf_file, random_tensors
from safetensors.numpy import save_file

from models.checkpoint import Model, load_model, save_checkpoint
from models.config import preset
from models.llama import init_params

ROOT = Path(__file__).parents[3]
CFG = replace(
    preset("tiny"),
    vocab_size=8192,
    d_model=512,
    d_ff=2048,
    num_layers=12,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": CFG.vocab_size,
    "hidden_size": CFG.d_model,
    "intermediate_size": CFG.d_ff,
    "num_hidden_layers": CFG.num_layers,
    "num_attention_heads": CFG.num_heads,
    "max_position_embeddings": CFG.max_position,
    "tie_word_embeddings": True,
}
MEASURE = """
import sys
import jax
from models.checkpoint import load_model
def status(name):  # of this program alone: ru_maxrss would count what its parent had
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if sys.argv[3] == "placed" else None
for path in sys.argv[4:]:
    load_model(path, shardings=place)
before = status("VmRSS")
model = load_model(sys.argv[1], dtype=sys.argv[2], shardings=place)
print((status("VmHWM") - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)))
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CFG)


def sharded(path: Path, tensors: dict[str, np.ndarray], dtypes: list) -> Path:
    """A folder of three shards; the stored types take turns."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    stored = {name: t.astype(dtypes[i % len(dtypes)]) for i, (name, t) in enumerate(tensors.items())}
    weight_map = {name: f"model-{1 + i % 3}-of-3.safetensors" for i, name in enumerate(stored)}
    for file in sorted(set(weight_map.values())):
        save_file({name: t for name, t in stored.items() if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def peak(path: Path, dtype: str, place: str = "numpy", *, first: tuple[Path, ...] = ()) -> float:
    """Peak memory of a load beyond what the process had, over the bytes of its result; `first` is loaded before."""
    command = [sys.executable, "-c", MEASURE, str(path), dtype, place, *map(str, first)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize(
    ("stored", "dtype", "place"),
    [
        ([ml_dtypes.bfloat16], "bfloat16", "numpy"),
        (["float32"], "bfloat16", "placed"),
        ([ml_dtypes.bfloat16, "float16", "float32"], "float32", "numpy"),
    ],
)
def test_safetensors(tmp_path, tensors, stored, dtype, place):
    assert 0.9 < peak(sharded(tmp_path / "m", tensors, stored), dtype, place) < 1.3


def test_gguf(tmp_path, tensors):
    assert 0.9 < peak(gguf_file(tmp_path / "m.gguf", CFG, tensors, QType.Q5_0), "bfloat16") < 1.3


@pytest.fixture(scope="module")
def ours(tensors, tmp_path_factory):
    """Our own checkpoints, and a small one beside: Orbax loads much of itself when it is first used."""
    path, small = tmp_path_factory.mktemp("ours"), preset("tiny")
    save_checkpoint(path / "small", Model(small, init_params(small, 0, "bfloat16"), None, "bfloat16"))
    save_checkpoint(path / "large", load_model(sharded(path / "m", tensors, ["float32"])))
    return path


@pytest.mark.parametrize("place", ["numpy", "placed"])
def test_our_own_checkpoint(ours, place):
    """Orbax holds what it restores at a time, 8 MB here, more than once."""
    assert 0.9 < peak(ours / "large", "bfloat16", place, first=(ours / "small",)) < 1.3

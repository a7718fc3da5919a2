"""Small Hugging Face folders and GGUF files, written from random or golden weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from golden import parity
from golden.values import TINY_LLAMA
from safetensors.numpy import save_file

from models.checkpoint.gguf import NAMES as GGUF_NAMES
from models.checkpoint.huggingface import NAMES
from models.checkpoint.huggingface_config import read_config
from models.checkpoint.safetensors_file import SafetensorsSource
from models.config import LlamaConfig


def tiny_tensors(dtype: str = "float32") -> dict[str, np.ndarray]:
    """The golden tiny model's tensors by their Hugging Face names."""
    source = SafetensorsSource([TINY_LLAMA / "model.safetensors"])
    tensors = {}
    for name, tensor in source.tensors.items():
        tensors[name] = np.empty(tensor.shape, dtype)
        source.read_into(tensor, tensors[name])
    return tensors


def tiny_config() -> LlamaConfig:
    return read_config(json.loads((TINY_LLAMA / "config.json").read_text()), where="tiny")


def hf_folder(path: Path, tensors: dict[str, np.ndarray] | None = None, **config) -> Path:
    """A copy of the golden folder in `path`, with other tensors and changed config fields (None: removed)."""
    shutil.copytree(TINY_LLAMA, path, dirs_exist_ok=True)
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    fields = json.loads((path / "config.json").read_text()) | config
    fields = {k: v for k, v in fields.items() if v is not None}
    (path / "config.json").write_text(json.dumps(fields))
    return path


def gguf_file(
    path: Path,
    cfg: LlamaConfig,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
    rope_freqs: np.ndarray | None = None,
) -> Path:
    """What llama.cpp's converter would write for these Hugging Face tensors: q and k rows interleaved."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(cfg.num_layers)
    writer.add_context_length(cfg.max_position)
    writer.add_embedding_length(cfg.d_model)
    writer.add_feed_forward_length(cfg.d_ff)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_freq_base(cfg.rope_theta)
    if cfg.rope_scaling is not None and cfg.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(cfg.rope_scaling.factor)
    tokens = ["<s>", "</s>", "t", "0", *(f"t{i}" for i in range(cfg.vocab_size - 4))]
    plain = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (cfg.vocab_size - 2)],
        "tokenizer.ggml.merges": ["t 0"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    for name, value in (plain | (fields or {})).items():
        add = {
            bool: writer.add_bool,
            float: writer.add_float32,
            str: writer.add_string,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[type(value)](name, value)
    back = {name: part for part, name in NAMES.items()}
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        part = back[name.replace(f"layers.{layer}.", "layers.{}.") if layer else name]
        if part.removesuffix("_bias") in ("q", "k"):
            halves = tensor.reshape(-1, 2, cfg.head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        written = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
        data = gguf.quantize(np.ascontiguousarray(tensor, np.float32), written)
        writer.add_tensor(GGUF_NAMES[part].format(layer), data, raw_dtype=written)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_tensors(cfg: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a whole model by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    D, F = cfg.d_model, cfg.d_ff
    layer = {
        "attn_norm": (D,),
        "q": (heads, D),
        "k": (kv, D),
        "v": (kv, D),
        "out": (D, heads),
        "mlp_norm": (D,),
        "gate": (F, D),
        "up": (F, D),
        "down": (D, F),
    }
    shapes = {NAMES["embed"]: (cfg.vocab_size, D), NAMES["final_norm"]: (D,)}
    if not cfg.tie_embeddings:
        shapes[NAMES["lm_head"]] = (cfg.vocab_size, D)
    for i in range(cfg.num_layers):
        shapes |= {NAMES[part].format(i): shape for part, shape in layer.items()}
    return {name: rng.standard_normal(shape, np.float32) * 0.2 for name, shape in shapes.items()}


def parity_folder(path: Path, name: str) -> Path:
    """The case `name` of golden/parity.py as a Hugging Face folder without a tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(parity.config(name)))
    save_file(parity.tensors(name), path / "model.safetensors")
    return path

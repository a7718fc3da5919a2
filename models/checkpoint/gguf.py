"""Llama models in GGUF: config and weights, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from models.checkpoint.assemble import assemble, with_biases
from models.checkpoint.cut import BLOCK_TOKENS, layers_per_group
from models.checkpoint.errors import CheckpointError
from models.checkpoint.gguf_fields import GGUFFields
from models.checkpoint.gguf_file import GGUFFile
from models.checkpoint.gguf_tokenizer import read_tokenizer
from models.checkpoint.model import Model
from models.checkpoint.target import Target
from models.checkpoint.tensor import Tensor
from models.config import LlamaConfig, RopeScaling
from models.rope import inverse_frequencies

NAMES = with_biases(
    {
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "lm_head": "output.weight",
        "attn_norm": "blk.{}.attn_norm.weight",
        "q": "blk.{}.attn_q.weight",
        "k": "blk.{}.attn_k.weight",
        "v": "blk.{}.attn_v.weight",
        "out": "blk.{}.attn_output.weight",
        "mlp_norm": "blk.{}.ffn_norm.weight",
        "gate": "blk.{}.ffn_gate.weight",
        "up": "blk.{}.ffn_up.weight",
        "down": "blk.{}.ffn_down.weight",
    }
)
_ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(path: Path, target: Target) -> Model:
    """Read a GGUF file; see `load_model`."""
    file = GGUFFile(path)
    cfg = read_config(file)
    params = assemble(
        cfg,
        _Source(file, cfg),
        NAMES,
        where=str(path),
        target=target,
        ignored=lambda name: name == _ROPE_FACTORS,
    )
    return Model(cfg, params, read_tokenizer(file), target.dtype)


def read_config(file: GGUFFile) -> LlamaConfig:
    """The model's config from its metadata; raises CheckpointError naming the field."""
    fields = GGUFFields(file)
    if (architecture := fields.get("general.architecture", str)) != "llama":
        raise CheckpointError(f"{file.path}: architecture {architecture!r}; only llama is supported")
    if experts := fields.get("llama.expert_count", int, 0):
        raise CheckpointError(f"{file.path}: {experts} experts; only dense llama models are supported")
    if (embedding := file.tensors.get(NAMES["embed"])) is None:
        raise CheckpointError(f"{file.path}: tensor {NAMES['embed']} is missing")
    d_model = fields.size("llama.embedding_length")
    num_heads = fields.size("llama.attention.head_count")
    num_layers = fields.size("llama.block_count")
    head_dim = fields.size("llama.attention.key_length", d_model // num_heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (value := fields.size(name, head_dim)) != head_dim:
            raise CheckpointError(
                f"{file.path}: {name} is {value}; only the head dim, {head_dim}, is supported"
            )
    try:
        cfg = LlamaConfig(
            vocab_size=fields.size("llama.vocab_size", embedding.shape[0]),
            d_model=d_model,
            d_ff=fields.size("llama.feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.size("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            norm_eps=_short(fields.get("llama.attention.layer_norm_rms_epsilon", float)),
            rope_theta=_short(fields.get("llama.rope.freq_base", float, 10_000.0)),
            max_position=fields.size("llama.context_length"),
            block_tokens=BLOCK_TOKENS,
            layers_per_group=layers_per_group(num_layers),
            rope_scaling=_rope_scaling(file, fields),
            tie_embeddings=NAMES["lm_head"] not in file.tensors,
            attention_bias=NAMES["q_bias"].format(0) in file.tensors,
            mlp_bias=NAMES["gate_bias"].format(0) in file.tensors,
        )
        _check_attention_is_full(file, fields, cfg.max_position)
        if _ROPE_FACTORS in file.tensors:
            cfg = replace(cfg, rope_scaling=_llama3_scaling(file, fields, cfg))
        return cfg
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


class _Source:
    """The file's weights as `assemble` wants them: the rows of q and k put back into halves."""

    def __init__(self, file: GGUFFile, cfg: LlamaConfig):
        self._file = file
        self._head_dim = cfg.head_dim

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._file.tensors

    def read_into(self, tensor: Tensor, out: np.ndarray) -> None:
        swapped = tensor.name.rpartition(".")[0].endswith((".attn_q", ".attn_k"))
        order = _half_order(out.shape[0], self._head_dim) if swapped else None
        for start, values in self._file.rows(tensor):
            if out.ndim == 1:
                out[slice(None) if order is None else order] = values.reshape(-1)
            elif order is None:
                out[start : start + len(values)] = values
            else:
                out[order[start : start + len(values)]] = values


def _half_order(num_rows: int, head_dim: int) -> np.ndarray:
    """Where each row of the file goes: llama.cpp rotates neighbours (0,1), (2,3), we halves (0,H/2)"""
    rows = np.arange(num_rows).reshape(-1, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _short(value: float) -> float:
    """The decimal that a float32 was written for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _check_attention_is_full(file: GGUFFile, fields: GGUFFields, max_position: int) -> None:
    """A sliding window that is wider than every sequence changes nothing; any other is not computed here."""
    window = fields.get("llama.attention.sliding_window", int, 0)
    if 0 < window < max_position:
        raise CheckpointError(
            f"{file.path}: llama.attention.sliding_window is {window}; only full attention is supported"
        )


def _rope_scaling(file: GGUFFile, fields: GGUFFields) -> RopeScaling | None:
    kind = fields.get("llama.rope.scaling.type", str, "none")
    if kind == "linear":
        return RopeScaling("linear", factor=_short(fields.get("llama.rope.scaling.factor", float)))
    if kind != "none":
        raise CheckpointError(f"{file.path}: RoPE scaling type {kind!r}; supported: none, linear, llama3")
    # the field of files from 2023
    factor = _short(fields.get("llama.rope.scale_linear", float, 1.0))
    return None if factor == 1.0 else RopeScaling("linear", factor=factor)


def _llama3_scaling(file: GGUFFile, fields: GGUFFields, cfg: LlamaConfig) -> RopeScaling:
    """GGUF keeps llama3 scaling as one divisor per frequency; find the parameters that give them."""
    if cfg.rope_scaling is not None:
        raise CheckpointError(f"{file.path}: both linear RoPE scaling and tensor {_ROPE_FACTORS}")
    tensor = file.tensors[_ROPE_FACTORS]
    divisors = np.concatenate([values.reshape(-1) for _, values in file.rows(tensor)])
    original = fields.size("llama.rope.scaling.original_context_length", 8192)
    scaling = RopeScaling("llama3", factor=_short(divisors.max()), original_max_position=original)
    plain = inverse_frequencies(cfg)
    expected = plain / inverse_frequencies(replace(cfg, rope_scaling=scaling))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(f"{file.path}: tensor {_ROPE_FACTORS} is not llama3 scaling as we know it")
    return scaling

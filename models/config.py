"""The shape of a Llama-family decoder: one frozen, hashable record, and presets for serving and tests.

Hashable because it is a static argument of every jitted step. Token ids with a meaning (BOS, EOS) are the
tokenizer's, not the model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are stretched beyond the context a model was first trained on.

    `linear` divides every frequency by `factor`. `llama3` leaves wavelengths shorter than
    `original_max_position / high_freq_factor` alone, divides those longer than
    `original_max_position / low_freq_factor` by `factor`, and interpolates between.
    """

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear"):
            raise ValueError(f"RoPE scaling kind {self.kind!r}: expected 'llama3' or 'linear'")
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"RoPE scaling factor must be at least 1, got {self.factor}")
        if self.kind == "llama3":
            if not 0.0 < self.low_freq_factor < self.high_freq_factor:
                raise ValueError(
                    f"llama3 RoPE scaling needs 0 < low_freq_factor < high_freq_factor, "
                    f"got {self.low_freq_factor} and {self.high_freq_factor}"
                )
            if self.original_max_position < 1:
                raise ValueError(f"original_max_position must be positive, got {self.original_max_position}")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one model, and how serving cuts it: blocks of tokens, groups of layers."""

    vocab_size: int  # V
    d_model: int  # D
    d_ff: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    norm_eps: float
    rope_theta: float
    max_position: int  # positions 0 … max_position-1 are valid
    block_tokens: int  # Z: tokens of one KV block
    layers_per_group: int  # l: layers that one prefill program computes
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False  # of q, k, v and the output projection
    mlp_bias: bool = False  # of gate, up and down

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, RoPE rotates pairs: got {self.head_dim}")
        if self.num_layers % self.layers_per_group:
            raise ValueError(f"{self.num_layers} layers do not divide into groups of {self.layers_per_group}")
        if not 0.0 < self.norm_eps < 1.0:
            raise ValueError(f"norm_eps must lie between 0 and 1, got {self.norm_eps}")
        if not self.rope_theta > 1.0:
            raise ValueError(f"rope_theta must be greater than 1, got {self.rope_theta}")

    @property
    def queries_per_kv(self) -> int:
        """G: query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_groups(self) -> int:
        """Layer groups of the model."""
        return self.num_layers // self.layers_per_group


PRESETS = {
    "tiny": LlamaConfig(
        vocab_size=515,
        d_model=72,
        d_ff=152,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=20,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position=512,
        block_tokens=16,
        layers_per_group=2,
        tie_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152,
        d_model=576,
        d_ff=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        max_position=8192,
        block_tokens=32,
        layers_per_group=6,
        tie_embeddings=True,
    ),
    "llama3-8b": LlamaConfig(
        vocab_size=128_256,
        d_model=4096,
        d_ff=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position=131_072,
        block_tokens=256,
        layers_per_group=8,
        rope_scaling=RopeScaling("llama3", factor=8.0),
    ),
    "llama3-70b": LlamaConfig(
        vocab_size=128_256,
        d_model=8192,
        d_ff=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position=131_072,
        block_tokens=256,
        layers_per_group=10,
        rope_scaling=RopeScaling("llama3", factor=8.0),
    ),
}


def preset(name: str) -> LlamaConfig:
    """The preset called `name`; raises ValueError naming the known ones."""
    if name not in PRESETS:
        raise ValueError(f"unknown model preset {name!r}: expected one of {sorted(PRESETS)}")
    return PRESETS[name]

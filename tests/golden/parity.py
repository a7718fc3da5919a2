"""Small random models of every shape, made from fixed seeds: what make_parity.py gives to transformers, and tests to us.

Needs numpy only. `RandomState`'s numbers are the same in every version of NumPy.
"""

from typing import Any

import numpy as np

V = 48
_BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LONG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}

SHORT: dict[str, dict[str, Any]] = {
    "heads_1_to_1": {"head_dim": 6},
    "heads_3_to_1_tied": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "tie_word_embeddings": True,
    },
    "heads_8_to_1": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "attention_bias_tied": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
    "llama3_of_64": {
        "head_dim": 16,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear_by_type": {"head_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.5}},
}
LONG: dict[str, dict[str, Any]] = {
    "long_llama3_8": _LONG | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **_LLAMA3}},
    "long_llama3_32": _LONG | {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, **_LLAMA3}},
    "long_linear": _LONG | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "long_plain": _LONG,
}
CASES = SHORT | LONG
POSITIONS = (0, 1, 100, 199)
LONG_POSITIONS = (0, 100, 1000, 5000, 10_000, 15_000, 20_000)


def positions(name: str) -> tuple[int, ...]:
    return LONG_POSITIONS if name in LONG else POSITIONS


def config(name: str) -> dict[str, Any]:
    """config.json of the case."""
    return _BASE | CASES[name]


def tokens(name: str) -> list[int]:
    """A prompt that reaches the last of `positions`."""
    return _random(name, 1).randint(0, V, positions(name)[-1] + 1).tolist()


def tensors(name: str) -> dict[str, np.ndarray]:
    """Float32 weights by their Hugging Face names."""
    cfg, random = config(name), _random(name, 0)
    D, F, N, K = (
        cfg[field]
        for field in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    H = cfg.get("head_dim", D // N)
    made: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, *, bias: bool = False, gain: float = 1.0) -> None:
        made[f"{name}.weight"] = random.standard_normal((rows, columns)) * (gain / columns**0.5)
        if bias:
            made[f"{name}.bias"] = random.standard_normal(rows) * 0.5

    matrix("model.embed_tokens", V, D, gain=D**0.5)
    for i in range(cfg["num_hidden_layers"]):
        layer, bias = f"model.layers.{i}", cfg.get("attention_bias", False)
        for part, heads, gain in (("q", N, 1.7), ("k", K, 1.7), ("v", K, 1.0)):
            matrix(f"{layer}.self_attn.{part}_proj", heads * H, D, bias=bias, gain=gain)
        matrix(f"{layer}.self_attn.o_proj", D, N * H, bias=bias, gain=3.0)
        for part in ("gate", "up"):
            matrix(f"{layer}.mlp.{part}_proj", F, D, bias=cfg.get("mlp_bias", False))
        matrix(f"{layer}.mlp.down_proj", D, F, bias=cfg.get("mlp_bias", False))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}.{norm}.weight"] = 1.0 + 0.1 * random.standard_normal(D)
    made["model.norm.weight"] = 1.0 + 0.1 * random.standard_normal(D)
    if not cfg["tie_word_embeddings"]:
        matrix("lm_head", V, D, gain=3.0)
    return {name: value.astype(np.float32) for name, value in made.items()}


def _random(name: str, stream: int) -> np.random.RandomState:
    # the long models are one model, under different scalings
    return np.random.RandomState((0 if name in LONG else 1 + list(SHORT).index(name), stream))

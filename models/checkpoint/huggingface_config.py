"""Hugging Face's config.json as our config: what is read is used, and what would be ignored is refused."""

from __future__ import annotations

from typing import Any

from models.checkpoint.cut import BLOCK_TOKENS, layers_per_group
from models.checkpoint.errors import CheckpointError
from models.config import LlamaConfig, RopeScaling

# what Hugging Face takes for a field that the file does not have, where that depends on the model type
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
}
_ROPE_TYPES = "default, linear, llama3"
_REQUIRED = object()


def read_config(config: dict[str, Any], *, where: str) -> LlamaConfig:
    """config.json as LlamaConfig; absent fields have Hugging Face's defaults. Raises CheckpointError."""
    for name, supported in (
        ("model_type", tuple(_DEFAULTS)),
        ("hidden_act", ("silu",)),
        ("partial_rotary_factor", (1.0,)),
        ("quantization_config", ()),
    ):
        if (value := config.get(name)) is not None and value not in supported:
            only = " or ".join(map(repr, supported)) or "none"
            raise CheckpointError(f"{where}: {name} is {value!r:.80}; only {only} is supported")

    config = _DEFAULTS[config.get("model_type") or "llama"] | config

    def field(name: str, default: Any = _REQUIRED) -> Any:
        value = config.get(name)
        if value is None and default is _REQUIRED:
            raise CheckpointError(f"{where}: {name} is missing")
        return default if value is None else value

    def flag(name: str) -> bool:
        if not isinstance(value := field(name, False), bool):
            raise CheckpointError(f"{where}: {name} is {value!r:.80}; expected true or false")
        return value

    rope = _rope_fields(config, where)
    try:
        num_heads, d_model, num_layers = (
            field("num_attention_heads"),
            field("hidden_size"),
            field("num_hidden_layers"),
        )
        cfg = LlamaConfig(
            vocab_size=field("vocab_size"),
            d_model=d_model,
            d_ff=field("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=field("num_key_value_heads", num_heads),
            head_dim=field("head_dim", d_model // num_heads),
            norm_eps=float(field("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or field("rope_theta", 10_000.0)),
            max_position=field("max_position_embeddings"),
            block_tokens=BLOCK_TOKENS,
            layers_per_group=layers_per_group(num_layers),
            rope_scaling=_rope_scaling(rope, where),
            tie_embeddings=flag("tie_word_embeddings"),
            attention_bias=flag("attention_bias"),
            mlp_bias=flag("mlp_bias"),
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    _check_attention_is_full(config, cfg.max_position, where)
    return cfg


def _check_attention_is_full(config: dict[str, Any], max_position: int, where: str) -> None:
    """A sliding window that is wider than every sequence changes nothing; any other is not computed here."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return
    if not isinstance(window, int) or window < max_position:
        raise CheckpointError(
            f"{where}: sliding_window is {window!r:.80}; only full attention is supported: null, or at least "
            f"max_position_embeddings, {max_position}"
        )


def _rope_fields(config: dict[str, Any], where: str) -> dict[str, Any]:
    """`rope_scaling`, or `rope_parameters` as newer files call it."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{where}: {name} is {rope!r:.80}; expected a JSON object")
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(
            f"{where}: {name}: partial_rotary_factor is {part!r:.80}; only 1.0 is supported"
        )
    return rope


def _rope_scaling(rope: dict[str, Any], where: str) -> RopeScaling | None:
    kinds = {rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{where}: RoPE scaling has both types {' and '.join(sorted(map(repr, kinds)))}"
        )
    kind = kinds.pop() if kinds else None
    if kind is None and "factor" in rope:
        raise CheckpointError(
            f"{where}: RoPE scaling has a factor but no rope_type; supported: {_ROPE_TYPES}"
        )
    if kind in (None, "default"):
        return None
    try:
        if kind == "linear":
            return RopeScaling("linear", factor=float(rope["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=int(rope["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise CheckpointError(f"{where}: RoPE scaling {kind!r} without {error}") from error
    raise CheckpointError(f"{where}: RoPE scaling type {kind!r}; supported: {_ROPE_TYPES}")

"""Llama models as a Hugging Face folder: config.json, safetensors, tokenizer.json and their companions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.checkpoint.assemble import assemble
from models.checkpoint.cut import BLOCK_TOKENS, layers_per_group
from models.checkpoint.errors import CheckpointError
from models.checkpoint.model import Model
from models.checkpoint.safetensors_file import SafetensorsSource
from models.checkpoint.target import Target
from models.config import LlamaConfig, RopeScaling
from models.tokenizer import Tokenizer, TokenizerError, TokenizerSettings, read_backend

NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "out": "model.layers.{}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
CONFIG_FILE, INDEX_FILE, SINGLE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
_REQUIRED = object()


def load_huggingface(folder: Path, target: Target) -> Model:
    """Read a Hugging Face folder; see `load_model`. `tokenizer` is None if there is no tokenizer.json."""
    cfg, tokenizer = read_text(folder)
    params = assemble(
        cfg,
        SafetensorsSource(_weight_files(folder)),
        NAMES,
        where=str(folder),
        target=target,
        # Old checkpoints keep RoPE's frequencies; some with tied embeddings repeat them as lm_head.
        ignored=lambda name: (
            name.endswith(".rotary_emb.inv_freq") or (cfg.tie_embeddings and name == NAMES["lm_head"])
        ),
    )
    return Model(cfg, params, tokenizer, target.dtype)


def read_text(folder: Path) -> tuple[LlamaConfig, Tokenizer | None]:
    """Config and tokenizer of a Hugging Face folder; no weights are read."""
    config = _read_json(folder / CONFIG_FILE)
    cfg = read_config(config, where=str(folder / CONFIG_FILE))
    return cfg, read_tokenizer(folder, config, cfg.vocab_size)


def read_config(config: dict[str, Any], *, where: str) -> LlamaConfig:
    """config.json as LlamaConfig; absent fields have Hugging Face's defaults. Raises CheckpointError."""
    for name, only in (
        ("model_type", "llama"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("partial_rotary_factor", 1.0),
        ("quantization_config", None),
    ):
        if (value := config.get(name, only)) not in (only, None):
            raise CheckpointError(f"{where}: {name} is {value!r:.80}; only {only!r} is supported")

    def field(name: str, default: Any = _REQUIRED) -> Any:
        value = config.get(name)
        if value is None and default is _REQUIRED:
            raise CheckpointError(f"{where}: {name} is missing")
        return default if value is None else value

    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10_000.0
    try:
        num_heads, d_model, num_layers = (
            field("num_attention_heads"),
            field("hidden_size"),
            field("num_hidden_layers"),
        )
        return LlamaConfig(
            vocab_size=field("vocab_size"),
            d_model=d_model,
            d_ff=field("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=field("num_key_value_heads", num_heads),
            head_dim=field("head_dim", d_model // num_heads),
            norm_eps=float(field("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            max_position=field("max_position_embeddings", 2048),
            block_tokens=BLOCK_TOKENS,
            layers_per_group=layers_per_group(num_layers),
            rope_scaling=_rope_scaling(rope, where),
            tie_embeddings=bool(field("tie_word_embeddings", False)),
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def read_tokenizer(folder: Path, config: dict[str, Any], vocab_size: int) -> Tokenizer | None:
    """tokenizer.json with BOS, end tokens and chat template gathered from the files around it.

    End tokens are the union of all files', the tokenizer's first. Whether BOS is added is tokenizer_config's
    `add_bos_token` or else what tokenizer.json's post-processor does. Raises CheckpointError naming the file.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = read_backend(path)
        about = _read_json(folder / "tokenizer_config.json", optional=True)
        generation = _read_json(folder / "generation_config.json", optional=True)

        def token_id(name: str) -> list[int]:
            token = about.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token is None:
                return []
            if (index := backend.token_to_id(token)) is None:
                raise CheckpointError(
                    f"{folder / 'tokenizer_config.json'}: {name} {token!r} is not in {path.name}"
                )
            return [index]

        bos = [*token_id("bos_token"), *_ids(config.get("bos_token_id"))]
        ends = [
            *token_id("eos_token"),
            *_ids(config.get("eos_token_id")),
            *_ids(generation.get("eos_token_id")),
        ]
        for index in (*bos, *ends):
            if not 0 <= index < vocab_size:
                raise CheckpointError(
                    f"{folder}: BOS or EOS id {index} lies outside the vocabulary of {vocab_size}"
                )
        adds_bos = about.get("add_bos_token")
        if adds_bos is None:
            adds_bos = bool(bos) and backend.encode("x").ids[:1] == bos[:1]
        settings = TokenizerSettings(
            bos_id=bos[0] if bos else None,
            eos_ids=tuple(dict.fromkeys(ends)),
            add_bos=bool(adds_bos),
            chat_template=_chat_template(folder, about),
        )
        return Tokenizer(backend, settings)
    except TokenizerError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _rope_scaling(rope: dict[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type"))
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
    raise CheckpointError(f"{where}: RoPE scaling type {kind!r}; supported: default, linear, llama3")


def _weight_files(folder: Path) -> list[Path]:
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        return [folder / SINGLE_FILE]
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map is not a table of tensor and file")
    for tensor, name in weight_map.items():
        if Path(name).name != name:
            raise CheckpointError(f"{index_path}: tensor {tensor} is in {name!r}, not a file of this folder")
        if not (folder / name).exists():
            raise CheckpointError(f"{index_path}: tensor {tensor} is in {name}, which is not there")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _chat_template(folder: Path, about: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template = about.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template


def _ids(value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"BOS or EOS id {value!r} is not a token id")
    return ids


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value

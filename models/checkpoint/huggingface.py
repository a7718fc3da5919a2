"""Llama models as a Hugging Face folder: config.json, safetensors, a tokenizer and their companions."""

from __future__ import annotations

from pathlib import Path

from models.checkpoint.assemble import assemble, with_biases
from models.checkpoint.errors import CheckpointError
from models.checkpoint.huggingface_config import read_config
from models.checkpoint.huggingface_tokenizer import CONFIG_FILE, read_tokenizer
from models.checkpoint.json_file import read_json
from models.checkpoint.model import Model
from models.checkpoint.safetensors_file import SafetensorsSource
from models.checkpoint.target import Target
from models.config import LlamaConfig
from models.tokenizer import Tokenizer

NAMES = with_biases(
    {
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
)
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


def load_huggingface(folder: Path, target: Target) -> Model:
    """Read a Hugging Face folder; see `load_model`. `tokenizer` is None if the folder has none."""
    cfg, tokenizer = read_text(folder)
    params = assemble(
        cfg,
        _open_weights(folder),
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
    config = read_json(folder / CONFIG_FILE)
    cfg = read_config(config, where=str(folder / CONFIG_FILE))
    return cfg, read_tokenizer(folder, config, cfg.vocab_size)


def _open_weights(folder: Path) -> SafetensorsSource:
    """The headers of the one file, or of all shards: each tensor must be where the index says."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        return SafetensorsSource([folder / SINGLE_FILE])
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map is not a table of tensor and file")
    for tensor, name in weight_map.items():
        if Path(name).name != name:
            raise CheckpointError(f"{index_path}: tensor {tensor} is in {name!r}, not a file of this folder")
        if not (folder / name).exists():
            raise CheckpointError(f"{index_path}: tensor {tensor} is in {name}, which is not there")
    source = SafetensorsSource([folder / name for name in sorted(set(weight_map.values()))])
    for tensor, name in weight_map.items():
        if tensor not in source.tensors or source.tensors[tensor].file != str(folder / name):
            raise CheckpointError(
                f"{folder / name}: tensor {tensor} is not there, as {INDEX_FILE} says it is"
            )
    return source

"""What `--model` names: a checkpoint of any format, or a preset with random weights and a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from launch.process import UsageError
from models.checkpoint import CheckpointError, Model, load_model, load_text
from models.config import LlamaConfig, preset
from models.llama import init_params
from models.tokenizer import Tokenizer, TokenizerSettings, byte_level_bpe

_PRESET = "preset:"
_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}" + _END + "\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ModelText(NamedTuple):
    """A model without its weights: what the frontend needs."""

    cfg: LlamaConfig
    tokenizer: Tokenizer


def load(source: str, dtype: str) -> Model:
    """The model, its weights as NumPy arrays of `dtype`. Raises UsageError."""
    try:
        if source.startswith(_PRESET):
            cfg = preset(source.removeprefix(_PRESET))
            return Model(cfg, init_params(cfg, 0, dtype), byte_tokenizer(), dtype)
        return load_model(source, dtype=dtype)
    except (CheckpointError, ValueError, OSError) as error:
        raise _usage(source, error) from error


def load_without_weights(source: str) -> ModelText:
    """Config and tokenizer of the model. Raises UsageError."""
    try:
        if source.startswith(_PRESET):
            return ModelText(preset(source.removeprefix(_PRESET)), byte_tokenizer())
        cfg, tokenizer = load_text(source)
    except (CheckpointError, ValueError, OSError) as error:
        raise _usage(source, error) from error
    if tokenizer is None:
        raise UsageError(f"--model={source} has no tokenizer: the frontend needs one")
    return ModelText(cfg, tokenizer)


def served_name(source: str) -> str:
    """The name that requests ask for, if no other is set: the last part of the path."""
    return source.removeprefix(_PRESET) if source.startswith(_PRESET) else Path(source).name


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one that ends a turn."""
    letters = sorted(ByteLevel.alphabet())
    end = len(letters)
    backend = byte_level_bpe([*letters, _END], [], pre_tokenizer="gpt-2", control=[end])
    return Tokenizer(backend, TokenizerSettings(eos_ids=(end,), chat_template=_TEMPLATE))


def _usage(source: str, error: Exception) -> UsageError:
    message = " ".join(str(error).split())
    return UsageError(
        f"--model={source}: {message}; give a checkpoint folder, a GGUF file or preset:tiny"
        " (python -m launch.convert makes checkpoints)"
    )

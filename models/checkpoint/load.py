"""One door to every format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from models.checkpoint import gguf, gguf_tokenizer, huggingface, orbax
from models.checkpoint.errors import CheckpointError
from models.checkpoint.gguf import load_gguf
from models.checkpoint.gguf_file import GGUFFile
from models.checkpoint.huggingface import load_huggingface
from models.checkpoint.huggingface_tokenizer import CONFIG_FILE
from models.checkpoint.model import Model
from models.checkpoint.orbax import MANIFEST_FILE, load_orbax, saved_dtype
from models.checkpoint.target import Target
from models.config import LlamaConfig
from models.llama import DTYPES
from models.tokenizer import Tokenizer


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    shardings: Any = None,
    verify: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load our checkpoint folder, a Hugging Face folder or a GGUF file, recognised by its content.

    `dtype`: "bfloat16" or "float32"; None: as saved (ours), else bfloat16. Without `shardings` parameters are
    NumPy arrays; with one Sharding, or a tree of them like the parameters, each is placed on devices as it is
    read. Beyond the result, a load needs one parameter and a few MB (our own folders: some times 4 MB or a
    32nd of all). `verify` is for our own folders: compare the weights' fingerprint. `on_progress(done,
    total)` in bytes. Raises CheckpointError naming file and tensor or field.
    """
    path = Path(path).absolute()
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {sorted(DTYPES)}")
    kind = _kind(path)
    if kind == "ours":
        target = Target(dtype or saved_dtype(path), shardings, on_progress)
        return load_orbax(path, target, verify=verify)
    target = Target(dtype or "bfloat16", shardings, on_progress)
    model = load_huggingface(path, target) if kind == "huggingface" else load_gguf(path, target)
    _check_vocabulary(path, model.cfg, model.tokenizer)
    return model


def load_text(path: str | os.PathLike[str]) -> tuple[LlamaConfig, Tokenizer | None]:
    """Config and tokenizer of any format `load_model` knows, without its weights. Raises CheckpointError."""
    path = Path(path).absolute()
    match _kind(path):
        case "ours":
            cfg, tokenizer = orbax.read_text(path)
        case "huggingface":
            cfg, tokenizer = huggingface.read_text(path)
        case "gguf":
            file = GGUFFile(path)
            cfg, tokenizer = gguf.read_config(file), gguf_tokenizer.read_tokenizer(file)
    _check_vocabulary(path, cfg, tokenizer)
    return cfg, tokenizer


def _kind(path: Path) -> Literal["ours", "huggingface", "gguf"]:
    if (path / MANIFEST_FILE).is_file():
        return "ours"
    if (path / CONFIG_FILE).is_file():
        return "huggingface"
    if path.is_file():
        return "gguf"
    if path.is_dir():
        raise CheckpointError(f"{path}: neither {MANIFEST_FILE} nor {CONFIG_FILE} is in this folder")
    raise CheckpointError(f"{path}: no such file or folder")


def _check_vocabulary(path: Path, cfg: LlamaConfig, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {cfg.vocab_size}"
        )

"""Golden values for tests, and the model file that some of them belong to."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from launch.model_cache import GGUF, cache_directory

HERE = Path(__file__).parent
TINY_LLAMA = HERE / "tiny_llama"
SENTENCEPIECE = HERE / "sentencepiece"


def smollm2() -> dict:
    return json.loads((HERE / "smollm2.json").read_text())


def tiny_llama_logits() -> dict:
    return json.loads((TINY_LLAMA / "logits.json").read_text())


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct's GGUF from $MOONCAKE_MODEL or the user's cache; else skips the test."""
    path = Path(os.environ.get("MOONCAKE_MODEL") or cache_directory() / GGUF)
    if not path.is_file():
        pytest.skip(f"{path} is not there: run `python -m launch.fetch` or set MOONCAKE_MODEL")
    return path


def sentencepiece_texts() -> list[dict]:
    return json.loads((SENTENCEPIECE / "texts.json").read_text())


def parity_logits(name: str) -> dict[int, np.ndarray]:
    """Position → logits `[V]` of the case `name` of golden/parity.py."""
    rows = json.loads((HERE / "parity.json").read_text())[name]
    return {int(position): np.asarray(row) for position, row in rows.items()}

"""What is chosen per backend, in one place: storage, padding and block sizes that pay off there and nowhere else."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from models.config import LlamaConfig


@dataclass(frozen=True)
class Platform:
    """Choices for one backend; hashable, because it is a static argument of jitted steps."""

    name: str
    compiler_options: tuple[tuple[str, Any], ...]  # XLA's, of every program of an engine
    bf16_as_bits: bool  # gathered and sliced bf16 arrays are uint16 bits: XLA:CPU moves bf16 via float32
    min_dot_rows: int  # dots with fewer rows are padded to this many
    weights_first_rows: int  # up to here weights are a dot's left operand: XLA:CPU repacks the right one
    short_functions: bool  # what is rounded to bf16 is computed by `models.short`
    tile_tokens: int  # the largest prefill tile
    tile_tokens_by_columns: int  # up to here several devices split a tile's columns, not its rows
    attention_rows: int  # the most query tokens of one step of online softmax in prefill
    prefill_key_tokens: tuple[int, int]  # keys of such a step: at least, at most
    tail_key_tokens: int  # the most keys that attention of a tile by columns reads at a time
    prefill_scores: int  # queries times keys of a step, between these bounds
    decode_parts: (
        int  # decode attention takes a batch that divides by it in so many parts: less to keep in caches
    )
    # (largest batch, keys of one step), ascending; the last is open
    decode_key_tokens: tuple[tuple[int, int], ...]
    draws_row_by_row: bool  # a token is drawn for one row after the other: each takes its own settings' time

    def storage_dtype(self, dtype: str) -> np.dtype:
        """How KV and embedding rows of a `dtype` model lie in device memory."""
        if dtype == "float32":
            return np.dtype(np.float32)
        return np.dtype(np.uint16) if self.bf16_as_bits else np.dtype(jax.numpy.bfloat16)

    def prefill_pages(self, cfg: LlamaConfig, num_rows: int) -> int:
        """Pages that attention of a run of `num_rows` query tokens reads at a time: the fewer rows, the more."""
        keys = min(self.prefill_key_tokens[1], self.prefill_scores // min(num_rows, self.attention_rows))
        fewest = self.prefill_fewest_pages(cfg)
        return fewest * max(1, keys // (fewest * cfg.block_tokens))

    def prefill_fewest_pages(self, cfg: LlamaConfig) -> int:
        """Pages that such attention reads at a time where not every row sees every key: it divides `prefill_pages`."""
        return max(1, self.prefill_key_tokens[0] // cfg.block_tokens)

    def tail_pages(self, cfg: LlamaConfig) -> int:
        """Pages that attention of a tile by columns reads at a time."""
        return max(1, min(self.tail_key_tokens, cfg.max_position) // cfg.block_tokens)

    def decode_pages(self, cfg: LlamaConfig, batch: int) -> int:
        """Pages per slot that decode attention reads at a time."""
        fitting = [keys for largest, keys in self.decode_key_tokens if batch <= largest]
        return max(1, (fitting or [self.decode_key_tokens[-1][1]])[0] // cfg.block_tokens)


CPU = Platform(
    name="cpu",
    compiler_options=(
        ("xla_cpu_prefer_vector_width", 512),
    ),  # softmax is a quarter faster than with its 256 bits
    bf16_as_bits=True,
    min_dot_rows=2,  # a bf16 matrix-vector product misses the matrix units: 6 times slower than two rows
    weights_first_rows=64,
    short_functions=True,
    tile_tokens=512,
    tile_tokens_by_columns=64,
    attention_rows=128,
    prefill_key_tokens=(128, 2048),
    tail_key_tokens=1024,
    prefill_scores=128 * 128,
    decode_parts=2,
    decode_key_tokens=((4, 256), (16, 128), (32, 64)),
    draws_row_by_row=True,
)
ACCELERATOR = Platform(
    name="accelerator",
    compiler_options=(),
    bf16_as_bits=False,
    min_dot_rows=1,
    weights_first_rows=0,
    short_functions=False,
    tile_tokens=2048,
    tile_tokens_by_columns=0,
    attention_rows=2048,
    prefill_key_tokens=(1024, 1024),
    tail_key_tokens=1024,
    prefill_scores=2048 * 1024,
    decode_parts=1,
    decode_key_tokens=((8, 2048), (64, 1024)),
    draws_row_by_row=False,
)


@functools.cache
def current() -> Platform:
    """The platform of JAX's default backend."""
    return CPU if jax.default_backend() == "cpu" else ACCELERATOR

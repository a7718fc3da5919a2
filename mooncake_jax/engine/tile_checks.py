"""What every prefill engine refuses before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.block import BlockFormat
from mooncake_jax.engine.contract import PrefillEngine


def checked_tokens(
    engine: PrefillEngine, slot: int, tokens: np.ndarray, start: int, num_held: int | None
) -> np.ndarray:
    """`tokens` as int32. `num_held`: leading tokens whose KV the slot holds; None: a `load` brings them.

    Raises ValueError for what the contract excludes.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not 1 <= tokens.size <= engine.tile_tokens:
        raise ValueError(f"tokens of shape {tokens.shape}: expected [T] with 1 ≤ T ≤ {engine.tile_tokens}")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"token ids must be integers, got {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= engine.vocab_size:
        raise ValueError(f"token ids {tokens.min()} … {tokens.max()}: the vocabulary has {engine.vocab_size}")
    Z = engine.format.block_tokens
    if start < 0 or start % Z:
        raise ValueError(f"start {start} is not a multiple of the block size {Z}")
    if start + tokens.size > engine.max_tokens:
        raise ValueError(
            f"positions {start} … {start + tokens.size - 1}: the engine holds {engine.max_tokens}"
        )
    if num_held is not None and start > num_held:
        raise ValueError(f"start {start} of slot {slot}, which holds {num_held} tokens")
    return tokens.astype(np.int32, copy=False)


def check_prefix(form: BlockFormat, group: int, blocks: Sequence[np.ndarray], count: int) -> None:
    """Raises ValueError when `load` did not give `count` blocks of this format."""
    if len(blocks) != count:
        raise ValueError(
            f"layer group {group}: load gave {len(blocks)} prefix blocks, {count} precede the tile"
        )
    for i, block in enumerate(blocks):
        if block.shape != form.group_shape or block.dtype != form.item_dtype:
            raise ValueError(
                f"layer group {group}, prefix block {i}: load gave {block.shape} {block.dtype}, "
                f"expected {form.group_shape} {form.item_dtype}"
            )

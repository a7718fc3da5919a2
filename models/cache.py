"""The device KV cache: per layer one array of pages `[B, P, K, 2, Z, H]`, in the byte layout of KV blocks.

B is slots here, P pages of a slot; page i of a slot holds positions i·Z … i·Z+Z-1. Because a page is laid
out as a block's layer, inserting and extracting blocks are plain copies. Every function returns the new
array and is meant to run with the old one donated. Writes never clamp: callers leave room for padding and
check positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.config import LlamaConfig

Pages = jax.Array  # [B, P, K, 2, Z, H]


def pages_shape(cfg: LlamaConfig, num_slots: int, num_pages: int) -> tuple[int, ...]:
    """Shape of one layer's cache."""
    return (num_slots, num_pages, cfg.num_kv_heads, 2, cfg.block_tokens, cfg.head_dim)


def to_storage(x: jax.Array, storage: np.dtype) -> jax.Array:
    """Values in model dtype to what the cache keeps: the same, or a bf16's bits."""
    return lax.bitcast_convert_type(x, jnp.uint16) if storage == np.uint16 else x.astype(storage)


def from_storage(x: jax.Array) -> jax.Array:
    """The inverse of `to_storage`; slice first, because changing the type of a whole cache would copy it."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def to_pages(cfg: LlamaConfig, both: jax.Array, num_valid: jax.Array) -> jax.Array:
    """Keys and values `[T, K, 2, H]` of a tile at a page start → pages `[M, K, 2, Z, H]`, 0 from row `num_valid`."""
    T = both.shape[0]
    Z = cfg.block_tokens
    both = jnp.where(jnp.arange(T)[:, None, None, None] < num_valid, both, jnp.zeros((), both.dtype))
    both = jnp.pad(both, ((0, -T % Z), (0, 0), (0, 0), (0, 0)))
    return both.reshape(-1, Z, *both.shape[1:]).transpose(0, 2, 3, 1, 4)


def write_pages(pages: Pages, new: jax.Array, slot: jax.Array, first_page: jax.Array) -> Pages:
    """Put `new` `[M, K, 2, Z, H]` at page `first_page` of `slot`; the caller ensures first_page + M ≤ P."""
    zero = jnp.zeros((), jnp.int32)
    return lax.dynamic_update_slice(pages, new[None], (slot, first_page, zero, zero, zero, zero))


def write_rows(pages: Pages, both: jax.Array, positions: jax.Array, active: jax.Array) -> Pages:
    """Put one token's keys and values `[b, K, 2, H]` per slot at `positions` `[b]`; inactive slots stay."""
    Z, b = pages.shape[4], positions.shape[0]
    page = jnp.where(active, positions // Z, pages.shape[1])  # past the end: dropped
    return pages.at[jnp.arange(b), page, :, :, positions % Z].set(both, mode="drop", unique_indices=True)


def read_pages(
    pages: Pages, slots: int | None, slot: jax.Array, first_page: jax.Array, count: int
) -> jax.Array:
    """Pages `first_page` … of one slot (`slots` None: `[K, 2, S, H]`) or of slots 0 … `slots`-1 (`[slots,
    K, 2, S, H]`).

    S is `count`·Z tokens. The caller ensures first_page + count ≤ P.
    """
    _, _, K, _, Z, H = pages.shape
    zero = jnp.zeros((), jnp.int32)
    sizes = (slots or 1, count, K, 2, Z, H)
    taken = lax.dynamic_slice(pages, (slot, first_page, zero, zero, zero, zero), sizes)
    tokens = taken.transpose(0, 2, 3, 1, 4, 5).reshape(-1, K, 2, count * Z, H)
    return tokens[0] if slots is None else tokens


def read_blocks(memory: jax.Array, layer: jax.Array, places: list[jax.Array]) -> jax.Array:
    """One layer of the blocks at `places` of a store's memory `[slots, L, K, 2, Z, H]`, one after the other:
    `[K, 2, S, H]`. Places must be in range."""
    _, _, K, _, Z, H = memory.shape
    zero = jnp.zeros((), jnp.int32)
    blocks = [
        lax.dynamic_slice(memory, (place, layer, zero, zero, zero, zero), (1, 1, K, 2, Z, H))[0, 0]
        for place in places
    ]
    return jnp.stack(blocks, axis=2).reshape(K, 2, len(places) * Z, H)


def insert_blocks(groups: Any, blocks: jax.Array, slot: jax.Array, first_page: jax.Array) -> Any:
    """Put blocks `[M, layers, K, 2, Z, H]` into the layers of one group, or of a list of groups, in order."""
    layers, tree = jax.tree.flatten(groups)
    return tree.unflatten(
        [write_pages(pages, blocks[:, i], slot, first_page) for i, pages in enumerate(layers)]
    )


def extract_block(groups: Any, slot: jax.Array, page: jax.Array) -> jax.Array:
    """One block of a slot over the layers of one group, or of a list of groups, `[layers, K, 2, Z, H]`."""
    zero = jnp.zeros((), jnp.int32)
    start = (slot, page, zero, zero, zero, zero)
    return jnp.stack(
        [lax.dynamic_slice(p, start, (1, 1, *p.shape[2:]))[0, 0] for p in jax.tree.leaves(groups)]
    )

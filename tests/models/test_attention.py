"""Cached attention against the dense reference, and that padding and stale pages are never read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from models import attention, cache, split
from models.config import preset
from models.platform import CPU

CFG = preset("tiny")
SMALL = dataclasses.replace(CPU, attention_rows=8, prefill_key_tokens=(32, 32), decode_key_tokens=((32, 32),))
S, N, K, H, Z = 75, CFG.num_heads, CFG.num_kv_heads, CFG.head_dim, CFG.block_tokens
RNG = np.random.default_rng(0)
Q, KEYS, VALUES = (RNG.normal(size=(S, heads, H)).astype(np.float32) for heads in (N, K, K))
DENSE = np.asarray(attention.dense_attention(jnp.asarray(Q), jnp.asarray(KEYS), jnp.asarray(VALUES)))
JUNK = 1e4


def filled_pages(num_tokens, *, slots=3, slot=1, num_pages=8):
    """A cache whose slot holds the first tokens of KEYS and VALUES, and junk everywhere else."""
    pages = np.full(cache.pages_shape(CFG, slots, num_pages), JUNK, np.float32)
    for i in range(num_tokens):
        pages[slot, i // Z, :, 0, i % Z], pages[slot, i // Z, :, 1, i % Z] = KEYS[i], VALUES[i]
    return jnp.asarray(pages)


@pytest.mark.parametrize("start", [0, 16, 32, 48, 64])
@pytest.mark.parametrize("attention_rows", [4, 128])
def test_tile_attention_equals_dense_rows(start, attention_rows):
    rows = slice(start, start + (8 if start < 64 else 4) + 4)
    platform = dataclasses.replace(SMALL, attention_rows=attention_rows)
    firsts = [np.int32(start)]
    out = jax.jit(attention.tile_attention, static_argnums=(4, 5, 6))(
        Q[rows], firsts, filled_pages(rows.stop), np.int32(1), platform, 2, 1
    )
    np.testing.assert_allclose(out, DENSE[rows], atol=2e-5)


def test_tile_attention_of_rows_in_two_places():
    rows = np.r_[16:24, 40:48]
    firsts = [np.int32(16), np.int32(40)]
    out = jax.jit(attention.tile_attention, static_argnums=(4, 5, 6))(
        Q[rows], firsts, filled_pages(48), np.int32(1), SMALL, 2, 1
    )
    np.testing.assert_allclose(out, DENSE[rows], atol=2e-5)


@functools.cache
def tail_step(num_devices):
    mesh, whole = Mesh(np.array(jax.devices()[:num_devices]), (split.AXIS,)), PartitionSpec()

    def step(queries, own, start, stored, pages, slot):
        return attention.tail_attention(queries, own, start, stored, 1, pages, slot, SMALL, 2, num_devices)

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize(
    ("in_store", "start"), [(0, 0), (0, 16), (0, 64), (1, 16), (3, 48), (4, 64), (1, 64), (2, 48)]
)
def test_tail_attention_over_store_and_cache_equals_dense_rows(in_store, start, num_devices):
    """The store's part of the cache is junk, and so are all blocks of the store that are not the prompt's."""
    rows, num_layers, layer = slice(start, start + 11), 4, 3
    held, places = filled_pages(start), [5, 0, 3, 2]
    memory = np.full((7, num_layers, K, 2, Z, H), JUNK, np.float32)
    for block, place in enumerate(places[:in_store]):
        memory[place, layer] = held[1, block]
    padded = np.array(places[:in_store] + [6] * (8 - in_store), np.int32)
    stored = attention.StoredBlocks(memory, padded, np.int32(in_store), np.int32(layer - 1))
    own = np.stack([KEYS[rows], VALUES[rows]], axis=2)
    pages = held.at[1, :in_store].set(JUNK)
    out = tail_step(num_devices)(Q[rows], own, np.int32(start), stored, pages, np.int32(1))
    np.testing.assert_allclose(out, DENSE[rows], atol=2e-5)


@pytest.mark.parametrize(("slots", "slot"), [(3, 1), (4, 1), (4, 2)])  # four slots are taken in two parts
@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 74])
def test_decode_attention_equals_dense_row_whatever_other_slots_do(position, slots, slot):
    positions = np.array([3, 7, 40, 9][:slots], np.int32)
    positions[slot] = position
    queries = np.broadcast_to(Q[position], (slots, N, H)).copy()
    pages = filled_pages(position + 1, slots=slots, slot=slot)
    out = jax.jit(attention.decode_attention, static_argnums=(4, 5))(
        queries, pages, positions, np.int32(position + 1), SMALL, 2
    )
    np.testing.assert_allclose(out[slot], DENSE[position], atol=2e-5)


def test_write_rows_leaves_inactive_slots_alone():
    pages = filled_pages(20)
    rows = np.ones((3, K, H), np.float32)
    positions, active = np.array([5, 20, 7], np.int32), np.array([False, True, False])
    new = np.asarray(jax.jit(cache.write_rows)(pages, np.stack([rows, rows * 2], axis=2), positions, active))
    changed = np.argwhere((new != np.asarray(pages)).any(axis=(2, 3, 5)))
    assert changed.tolist() == [[1, 20 // Z, 20 % Z]]
    assert (new[1, 1, :, 0, 4] == 1).all()
    assert (new[1, 1, :, 1, 4] == 2).all()


def test_pages_of_a_tile_are_zero_past_the_valid_tokens():
    both = np.ones((32, K, 2, H), np.float32)
    pages = np.asarray(cache.to_pages(CFG, jnp.asarray(both), np.int32(18)))
    assert pages.shape == (2, K, 2, Z, H)
    assert pages[0].min() == 1
    assert pages[1, :, :, :2].min() == 1
    assert pages[1, :, :, 2:].max() == 0

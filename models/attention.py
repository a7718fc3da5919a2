"""Attention of a prefill tile over its cached prefix, of a prompt's short tail over blocks where a store keeps them,
of one decode step over a batch of slots, and a dense reference.

Both fast forms run online softmax over runs of keys, with a trip count that is known only at run time: one
program serves every prefix length and reads no page it does not need. The G query heads of a KV head are
folded into rows, so grouped-query attention needs no repeated keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models import cache, short, split
from models.cache import Pages
from models.platform import Platform

_MASKED = -1e30  # a finite -inf: exp of it is 0, and a difference of two is no NaN
_LOG2_E = 1.4426950408889634


class StoredBlocks(NamedTuple):
    """Blocks with which a prompt begins, in the memory of a store: block i is `memory[places[i]]`."""

    memory: jax.Array  # [slots, L, K, 2, Z, H], storage dtype
    places: jax.Array  # [M] int32; those after the last block that counts are any slots
    num_blocks: jax.Array  # may be 0
    first_layer: jax.Array  # of the layer group at hand


class _Softmax(NamedTuple):
    """State of online softmax for rows R: running maximum, sum and weighted values (all float32)."""

    maximum: jax.Array  # [..., R, 1]
    total: jax.Array  # [..., R, 1]
    values: jax.Array  # [..., R, H]

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...]) -> _Softmax:
        """For rows `[…, R, H]`."""
        rows = (*shape[:-1], 1)
        return cls(jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros(shape))

    def over_devices(self, num_devices: int) -> _Softmax:
        """Of the keys of all devices, on every device."""
        if num_devices == 1:
            return self
        together = jnp.concatenate(self, axis=-1)  # one exchange costs less than three
        maxima, totals, values = jnp.split(lax.all_gather(together, split.AXIS), [1, 2], axis=-1)
        maximum = maxima.max(0, keepdims=True)
        fade = jnp.exp2(maxima - maximum)
        return _Softmax(maximum[0], (totals * fade).sum(0), (values * fade).sum(0))

    def finish(self) -> jax.Array:
        return self.values / self.total


def _scaled(queries: jax.Array) -> jax.Array:
    """Fold the 1/sqrt(H) and the change of base (exp to exp2) into the queries."""
    return queries * (queries.shape[-1] ** -0.5 * _LOG2_E)


def _dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """Batched matrix product over the leading axes, contracting a's last axis; float32 result."""
    batch = tuple(range(a.ndim - 2))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((a.ndim - 1,), (contract_b,)), (batch, batch)), precision, preferred_element_type=jnp.float32
    )


def exp2_weights(x: jax.Array, dtype: jnp.dtype, platform: Platform) -> jax.Array:
    """2**x for x ≤ 0, in `dtype`."""
    if dtype != jnp.bfloat16 or not platform.short_functions:
        return jnp.exp2(x).astype(dtype)
    return short.to_bfloat16(short.exp2(jnp.maximum(x, -126.0)))


def _extend(
    state: _Softmax | None,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array | None,
    platform: Platform,
) -> _Softmax:
    """Softmax state after some more keys; the first keys (state None) must leave every row that matters one."""
    scores = _dot(queries, keys, keys.ndim - 1)
    if mask is not None:
        scores = jnp.where(mask, scores, _MASKED)
    maximum = scores.max(-1, keepdims=True)
    if state is not None:
        maximum = jnp.maximum(state.maximum, maximum)
    weights = exp2_weights(scores - maximum, values.dtype, platform)
    total = weights.astype(jnp.float32).sum(-1, keepdims=True)
    mixed = _dot(weights, values, values.ndim - 2)
    if state is None:
        return _Softmax(maximum, total, mixed)
    fade = jnp.exp2(state.maximum - maximum)
    return _Softmax(maximum, state.total * fade + total, state.values * fade + mixed)


def tile_attention(
    queries: jax.Array,
    firsts: Sequence[jax.Array],
    pages: Pages,
    slot: jax.Array,
    platform: Platform,
    run_pages: int,
    few_pages: int,
) -> jax.Array:
    """Causal attention of a tile over the pages of `slot`, which hold the tile's own keys already.

    queries `[T, N, H]` float32 are equal runs of rows, run i at positions firsts[i] …; result `[T, N, H]`
    in the dtype of the products. Keys that every row of a piece sees are read `run_pages` at a time, the others
    `few_pages`, a part of them.
    """
    T, N, H = queries.shape
    K = pages.shape[2]
    run = T // len(firsts)
    rows = min(run, platform.attention_rows)
    with jax.named_scope("tile_attention"):
        dtype = jnp.float32 if pages.dtype == jnp.float32 else jnp.bfloat16
        q = _scaled(queries).astype(dtype).reshape(T, K, N // K, H)
        pieces = [
            _attend(
                q[row : min(row + rows, begin + run)],
                first + row - begin,
                pages,
                slot,
                platform,
                run_pages,
                few_pages,
            )
            for first, begin in zip(firsts, range(0, T, run), strict=True)
            for row in range(begin, begin + run, rows)
        ]
        return jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _attend(
    queries: jax.Array,
    first: jax.Array,
    pages: Pages,
    slot: jax.Array,
    platform: Platform,
    run_pages: int,
    few_pages: int,
) -> jax.Array:
    """Attention of rows `[T, K, G, H]` at positions first … over the pages of `slot`: `[T, N, H]`."""
    T, K, G, H = queries.shape
    Z = pages.shape[4]
    q = queries.transpose(1, 2, 0, 3).reshape(K, G * T, H)
    positions = first + jnp.tile(jnp.arange(T, dtype=jnp.int32), G)

    def read(j: jax.Array, count: int) -> jax.Array:
        return cache.read_pages(pages, None, slot, j * count, count)  # [K, 2, S, H]

    def extend(state: _Softmax, both: jax.Array, mask: jax.Array | None) -> _Softmax:
        # slice the bits: XLA:CPU moves bf16 by way of float32
        keys, values = (cache.from_storage(both[:, i]) for i in (0, 1))
        return _extend(state, q, keys, values, mask, platform)

    def whole(j: jax.Array, state: _Softmax) -> _Softmax:
        return extend(state, read(j, run_pages), None)

    def partial(j: jax.Array, state: _Softmax) -> _Softmax:
        keys_at = j * few_pages * Z + jnp.arange(few_pages * Z, dtype=jnp.int32)
        both = read(j, few_pages)
        written = (keys_at < first + T)[None, None, :, None]
        mask = (keys_at[None, :] <= positions[:, None])[None]
        return extend(state, jnp.where(written, both, jnp.zeros((), both.dtype)), mask)

    # every row sees key 0 in the first run: its maximum is finite from there on
    state = _Softmax.of_nothing((K, G * T, H))
    num_whole = (first + 1) // (run_pages * Z)
    state = lax.fori_loop(jnp.int32(0), num_whole, whole, state)
    begin, end = num_whole * (run_pages // few_pages), (first + T + few_pages * Z - 1) // (few_pages * Z)
    state = lax.fori_loop(begin, end, partial, state)
    mixed = state.finish().astype(queries.dtype).reshape(K, G, T, H)
    return mixed.transpose(2, 0, 1, 3).reshape(T, K * G, H)


def tail_attention(
    queries: jax.Array,
    own: jax.Array,
    start: jax.Array,
    stored: StoredBlocks,
    layer: int,
    pages: Pages,
    slot: jax.Array,
    platform: Platform,
    run_pages: int,
    num_devices: int,
) -> jax.Array:
    """Causal attention of a tile of few rows at positions start …: over its `own` keys and values `[T, K, 2, H]` in
    storage dtype, over the stored blocks, which are the prompt's first, and from there to `start` over the pages of
    `slot`. Each of the devices takes a share of the keys before `start`.

    queries and result `[T, N, H]` float32; `layer` counts within the group.
    """
    T, N, H = queries.shape
    K, Z = pages.shape[2], pages.shape[4]
    S = run_pages * Z
    in_store = stored.num_blocks * Z
    device = lax.axis_index(split.AXIS).astype(jnp.int32) if num_devices > 1 else jnp.zeros((), jnp.int32)
    with jax.named_scope("tail_attention"):
        dtype = jnp.float32 if pages.dtype == jnp.float32 else jnp.bfloat16
        q = _scaled(queries).astype(dtype).reshape(T, K, N // K, H).transpose(1, 2, 0, 3).reshape(K, -1, H)

        def read_store(j: jax.Array) -> jax.Array:
            at = stored.first_layer + layer
            places = lax.dynamic_slice_in_dim(stored.places, j * run_pages, run_pages)
            return cache.read_blocks(stored.memory, at, [places[i] for i in range(run_pages)])

        def read_pages(j: jax.Array) -> jax.Array:
            return cache.read_pages(pages, None, slot, j * run_pages, run_pages)

        def extend(
            read: Callable[[jax.Array], jax.Array], begin: jax.Array, end: jax.Array, state: _Softmax
        ) -> _Softmax:
            """By this device's share of the runs that hold positions begin … end-1."""

            def whole(j: jax.Array, state: _Softmax) -> _Softmax:
                both = cache.from_storage(read(j))
                return _extend(state, q, both[:, 0], both[:, 1], None, platform)

            def partial(j: jax.Array, state: _Softmax) -> _Softmax:
                keys_at = j * S + jnp.arange(S, dtype=jnp.int32)
                counts = (keys_at >= begin) & (keys_at < end)
                both = read(j)
                both = jnp.where(counts[None, None, :, None], both, jnp.zeros((), both.dtype))
                both = cache.from_storage(both)
                return _extend(state, q, both[:, 0], both[:, 1], counts[None, None], platform)

            def run(j: jax.Array, state: _Softmax) -> _Softmax:
                return lax.cond((j * S >= begin) & ((j + 1) * S <= end), whole, partial, j, state)

            first = begin // S
            num_runs = (end + S - 1) // S - first
            share = [first + num_runs * (device + i) // num_devices for i in (0, 1)]
            return lax.fori_loop(share[0], share[1], run, state)

        zero = jnp.zeros((), jnp.int32)
        state = extend(read_store, zero, in_store, _Softmax.of_nothing(q.shape))
        state = extend(read_pages, in_store, start, state).over_devices(num_devices)
        both = cache.from_storage(own.transpose(1, 2, 0, 3))
        offsets = jnp.arange(T, dtype=jnp.int32)
        causal = offsets[None, :] <= jnp.tile(offsets, N // K)[:, None]
        state = _extend(state, q, both[:, 0], both[:, 1], causal[None], platform)
        return state.finish().reshape(K, N // K, T, H).transpose(2, 0, 1, 3).reshape(T, N, H)


def decode_attention(
    queries: jax.Array,
    pages: Pages,
    positions: jax.Array,
    longest: jax.Array,
    platform: Platform,
    run_pages: int,
) -> jax.Array:
    """Attention of one token per slot 0 … b-1 over positions 0 … `positions[i]` of the slot, its own
    included.

    queries `[b, N, H]` float32; `longest` is the largest position that matters, plus one; result `[b, N,
    H]` float32.
    """
    b = queries.shape[0]
    parts = platform.decode_parts if b % platform.decode_parts == 0 else 1
    size = b // parts
    with jax.named_scope("decode_attention"):
        mixed = [
            _decode_rows(
                queries[first : first + size],
                pages,
                first,
                positions[first : first + size],
                longest,
                platform,
                run_pages,
            )
            for first in range(0, b, size)
        ]
        return jnp.concatenate(mixed) if parts > 1 else mixed[0]


def _decode_rows(
    queries: jax.Array,
    pages: Pages,
    first: int,
    positions: jax.Array,
    longest: jax.Array,
    platform: Platform,
    run_pages: int,
) -> jax.Array:
    """`decode_attention` of slots `first` …."""
    b, N, H = queries.shape
    K = pages.shape[2]
    run_tokens = run_pages * pages.shape[4]
    compute_dtype = jnp.float32 if pages.dtype == jnp.float32 else jnp.bfloat16
    q = _scaled(queries).astype(compute_dtype).reshape(b, K, N // K, H)
    slot = jnp.full((), first, jnp.int32)

    def run(j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        here = (j * run_tokens + jnp.arange(run_tokens, dtype=jnp.int32))[None, :] <= positions[:, None]
        both = cache.read_pages(pages, b, slot, j * run_pages, run_pages)  # [b, K, 2, S, H]
        both = jnp.where(here[:, None, None, :, None], both, jnp.zeros((), both.dtype))
        return cache.from_storage(both[:, :, 0]), cache.from_storage(both[:, :, 1]), here[:, None, None, :]

    state = _extend(None, q, *run(jnp.zeros((), jnp.int32)), platform)
    last = (longest + run_tokens - 1) // run_tokens
    state = lax.fori_loop(jnp.int32(1), last, lambda j, state: _extend(state, q, *run(j), platform), state)
    return state.finish().reshape(b, N, H)


def dense_attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """The plain reference: causal attention of `[S, N, H]` over `[S, K, H]`, all at once, in float32."""
    S, N, H = queries.shape
    G = N // keys.shape[1]
    keys, values = jnp.repeat(keys, G, axis=1), jnp.repeat(values, G, axis=1)
    scores = jnp.einsum("tnh,snh->nts", queries, keys, precision="highest") / jnp.sqrt(jnp.float32(H))
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool))[None], scores, -jnp.inf)
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, axis=-1), values, precision="highest")

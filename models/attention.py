"""Attention of a prefill tile over its cached prefix, of one decode step over a batch of slots, and a dense reference.

Both fast forms run online softmax over runs of keys, with a trip count that is known only at run time: one program
serves every prefix length and reads no page it does not need. The G query heads of a KV head are folded into rows,
so grouped-query attention needs no repeated keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models import cache
from models.cache import Pages

_MASKED = -1e30  # a finite -inf: exp of it is 0, and a difference of two is no NaN
_LOG2_E = 1.4426950408889634


class _Softmax(NamedTuple):
    """State of online softmax for rows R: running maximum, sum and weighted values (all float32)."""

    maximum: jax.Array  # [..., R, 1]
    total: jax.Array  # [..., R, 1]
    values: jax.Array  # [..., R, H]

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


def _scores(queries: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, _dot(queries, keys, keys.ndim - 1), _MASKED)


def _begin(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> _Softmax:
    """Softmax state after the first keys; `mask` leaves every row that matters at least one of them."""
    scores = _scores(queries, keys, mask)
    maximum = scores.max(-1, keepdims=True)
    weights = jnp.exp2(scores - maximum)
    return _Softmax(maximum, weights.sum(-1, keepdims=True), _dot(weights.astype(values.dtype), values, values.ndim - 2))


def _extend(state: _Softmax, queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> _Softmax:
    """Softmax state after some more keys."""
    scores = _scores(queries, keys, mask)
    maximum = jnp.maximum(state.maximum, scores.max(-1, keepdims=True))
    weights = jnp.exp2(scores - maximum)
    fade = jnp.exp2(state.maximum - maximum)
    return _Softmax(
        maximum,
        state.total * fade + weights.sum(-1, keepdims=True),
        state.values * fade + _dot(weights.astype(values.dtype), values, values.ndim - 2),
    )


def tile_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: Pages,
    slot: jax.Array,
    start: jax.Array,
    run_pages: int,
) -> jax.Array:
    """Attention of a tile at positions start … over itself (causal) and the `start` cached tokens of `slot`.

    queries `[T, N, H]` float32; keys, values `[T, K, H]` in compute dtype; result `[T, N, H]` float32.
    """
    T, N, H = queries.shape
    K = keys.shape[1]
    G = N // K
    with jax.named_scope("tile_attention"):
        q = _scaled(queries).astype(keys.dtype).reshape(T, K, G, H).transpose(1, 2, 0, 3).reshape(K, G * T, H)
        row = jnp.tile(jnp.arange(T), G)
        causal = row[:, None] >= jnp.arange(T)[None, :]
        state = _begin(q, keys.transpose(1, 0, 2), values.transpose(1, 0, 2), causal[None])
        run_tokens = run_pages * pages.shape[4]

        def step(j: jax.Array, state: _Softmax) -> _Softmax:
            cached = (j * run_tokens + jnp.arange(run_tokens, dtype=jnp.int32)) < start
            run = cache.read_pages(pages, None, slot, j * run_pages, run_pages)  # [K, 2, S, H]
            run = jnp.where(cached[None, None, :, None], run, jnp.zeros((), run.dtype))
            k, v = cache.from_storage(run[:, 0]), cache.from_storage(run[:, 1])
            return _extend(state, q, k, v, cached[None, None, :])

        state = lax.fori_loop(jnp.int32(0), (start + run_tokens - 1) // run_tokens, step, state)
        return state.finish().reshape(K, G, T, H).transpose(2, 0, 1, 3).reshape(T, N, H)


def decode_attention(
    queries: jax.Array, pages: Pages, positions: jax.Array, longest: jax.Array, run_pages: int
) -> jax.Array:
    """Attention of one token per slot 0 … b-1 over positions 0 … `positions[i]` of the slot, its own included.

    queries `[b, N, H]` float32; `longest` is the largest position that matters, plus one; result `[b, N, H]` float32.
    """
    b, N, H = queries.shape
    K = pages.shape[2]
    run_tokens = run_pages * pages.shape[4]
    zero = jnp.zeros((), jnp.int32)
    with jax.named_scope("decode_attention"):
        compute_dtype = jnp.float32 if pages.dtype == jnp.float32 else jnp.bfloat16
        q = _scaled(queries).astype(compute_dtype).reshape(b, K, N // K, H)

        def run(j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            here = (j * run_tokens + jnp.arange(run_tokens, dtype=jnp.int32))[None, :] <= positions[:, None]
            both = cache.read_pages(pages, b, zero, j * run_pages, run_pages)  # [b, K, 2, S, H]
            both = jnp.where(here[:, None, None, :, None], both, jnp.zeros((), both.dtype))
            return cache.from_storage(both[:, :, 0]), cache.from_storage(both[:, :, 1]), here[:, None, None, :]

        state = _begin(q, *run(zero))
        last = (longest + run_tokens - 1) // run_tokens
        state = lax.fori_loop(jnp.int32(1), last, lambda j, state: _extend(state, q, *run(j)), state)
        return state.finish().reshape(b, N, H)


def dense_attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """The plain reference: causal attention of `[S, N, H]` over `[S, K, H]`, all at once, in float32."""
    S, N, H = queries.shape
    G = N // keys.shape[1]
    keys, values = jnp.repeat(keys, G, axis=1), jnp.repeat(values, G, axis=1)
    scores = jnp.einsum("tnh,snh->nts", queries, keys, precision="highest") / jnp.sqrt(jnp.float32(H))
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool))[None], scores, -jnp.inf)
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, axis=-1), values, precision="highest")

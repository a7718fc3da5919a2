"""Drawing a token from logits: greedy, temperature, top-k, top-p. Pure in (logits, seed, step).

The random number of a row depends on its seed and step alone, never on its slot or on who shares the batch.
Log probabilities are those of the unmodified distribution (temperature 1, nothing cut off). Nothing is
sorted: the cut-offs of top-k and top-p are found by bisection over the bits of the probabilities, exact to
the last bit; tokens that tie with the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.draw import Draw

_COLUMNS = 256  # of the two-level search for the drawn token
_ONE_BITS = 0x3F800000  # float32 1.0: no probability is larger


Column = jax.Array | np.ndarray


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely token of each row of `[B, V]` (the lowest id among equals), and its log probability."""
    V = logits.shape[-1]
    top = logits.max(-1, keepdims=True)
    # in two stages: argmax is slow
    token = jnp.where(logits == top, jnp.arange(V, dtype=jnp.int32), V - 1).min(-1)
    return token, -jnp.log(jnp.exp(logits - top).sum(-1))


def sample(logits: jax.Array, draw: Draw) -> tuple[jax.Array, jax.Array]:
    """One token per row of `[B, V]`, and its log probability; rows with temperature 0 are greedy."""
    best, _ = greedy(logits)
    top = logits.max(-1, keepdims=True)
    is_greedy = draw.temperature <= 0.0
    temperature = jnp.where(is_greedy, 1.0, draw.temperature)[:, None]
    weights = jnp.exp((logits - top) / temperature)  # 1.0 for the most likely token
    weights = _keep_top_k(weights, draw.top_k)
    weights = _keep_top_p(weights, draw.top_p)
    drawn = _search(weights, _uniform(draw.seed, draw.step))
    token = jnp.where(is_greedy, best, drawn)
    return token, log_probability(logits, token)


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Log probability of `token` `[B]` under softmax of `logits` `[B, V]`."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1, mode="clip")[:, 0]
    top = logits.max(-1)
    return chosen - top - jnp.log(jnp.exp(logits - top[:, None]).sum(-1))


def _uniform(seed: Column, step: Column) -> jax.Array:
    """A number in [0, 1) per row, from its seed and step only."""

    def one(seed: Column, step: Column) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([seed, step.astype(jnp.uint32)]), impl="threefry2x32")
        return jax.random.uniform(key, (), jnp.float32)

    return jax.vmap(one)(seed, step)


def _largest_bits(enough: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Per row, the largest float32 in [0, 1] for which `enough` holds; it is monotone, and true at 0."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        holds = enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    low, _ = lax.fori_loop(
        0, 31, halve, (jnp.zeros((rows,), jnp.int32), jnp.full((rows,), _ONE_BITS, jnp.int32))
    )
    return lax.bitcast_convert_type(low, jnp.float32)


def _keep_top_k(weights: jax.Array, top_k: Column) -> jax.Array:
    """Zero all but the `top_k` largest weights of each row."""
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, weights.shape[-1]), weights.shape[-1])
    threshold = _largest_bits(
        lambda t: (weights >= t[:, None]).sum(-1, dtype=jnp.int32) >= wanted, weights.shape[0]
    )
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


def _keep_top_p(weights: jax.Array, top_p: Column) -> jax.Array:
    """Zero all but the smallest set of largest weights that has at least `top_p` of each row's sum."""
    wanted = jnp.minimum(top_p, 1.0) * weights.sum(-1)
    threshold = _largest_bits(
        lambda t: jnp.where(weights >= t[:, None], weights, 0.0).sum(-1) >= wanted, weights.shape[0]
    )
    threshold = jnp.where(top_p >= 1.0, 0.0, threshold)
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


def _search(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The token whose share of the cumulative weight contains `uniform` `[B]`; never one of weight 0."""
    B, V = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -V % _COLUMNS))).reshape(B, -1, _COLUMNS)
    block_ends = jnp.cumsum(blocks.sum(-1), axis=-1)
    target = uniform * block_ends[:, -1]
    block = _first_above(block_ends, target)
    before = jnp.where(
        block > 0, jnp.take_along_axis(block_ends, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0
    )
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    column = _first_above(jnp.cumsum(inside, axis=-1), target - before)
    return (block * _COLUMNS + column).astype(jnp.int32)


def _first_above(ends: jax.Array, target: jax.Array) -> jax.Array:
    """Index of the first interval `[…, n]` that ends above `target`, at most the last non-empty one."""
    last_rise = jnp.where(ends < ends[:, -1:], 1, 0).sum(-1)  # first index that reaches the total
    return jnp.minimum((ends <= target[:, None]).sum(-1), last_rise)

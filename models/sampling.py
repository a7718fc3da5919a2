"""Drawing a token from logits. Pure in (logits, tokens seen, seed, step).

In this order: biases and penalties change the logits, the temperature divides them, and then min-p, top-k and
top-p leave out what is unlikely; top-p counts the mass that top-k left. A temperature of 0 takes the most likely
token of the changed logits. Log probabilities are those of the unmodified distribution (nothing changed,
temperature 1, nothing left out).

The random numbers of a row depend on its seed and step alone, never on its slot or on who shares the batch.
Nothing of the vocabulary's size is sorted. The cut-offs of top-k and top-p are read off the `_CANDIDATES` largest
logits where these reach far enough. Where they do not, a larger top-k is found by bisection over the bits of the
logits; and for top-p a token is drawn as if without it, accepted if the more likely ones have less mass than
top-p, and else drawn again from the more likely ones (the rejection sampling of FlashInfer, arXiv 2501.01005).
Both are exact: only the time differs. Tokens that tie with the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.draw import MAX_TOP, Draw

_COLUMNS = 256  # of the two-level search for the drawn token
_CANDIDATES = 64
_BLOCKS = (16,)  # widths of the blocks whose maxima lead to the largest elements

Column = jax.Array | np.ndarray


class Drawn(NamedTuple):
    """One token per row, `[B]`, and the most likely ones, `[B, MAX_TOP]` (undefined where no row asks)."""

    token: jax.Array
    logprob: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


class _Likeliest(NamedTuple):
    """Of each row the most likely token (the lowest id among equals), `[B]`, and its logit, `[B, 1]`."""

    token: jax.Array
    logit: jax.Array


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely token of each row of `[B, V]` (the lowest id among equals), and its log probability."""
    token, top = _likeliest(logits)
    return token, -jnp.log(jnp.exp(logits - top).sum(-1))


def sample(logits: jax.Array, draw: Draw, seen: jax.Array, *, row_by_row: bool) -> Drawn:
    """Draw as `draw` says from `[B, V]`; `seen` `[≥ B, V]` int32 is what `remembered` counts.

    `row_by_row`: one row after the other, so that each takes the time of its own settings; else all together,
    and what one row needs is computed for all of them.
    """
    B = logits.shape[0]
    likeliest = _likeliest(logits)
    if row_by_row and B > 1:
        token, best, best_tokens = lax.map(
            lambda row: _alone(row, logits, likeliest, draw, seen), jnp.arange(B)
        )
    else:
        token = _tokens(logits, likeliest, draw, lambda: seen[:B])
        best, best_tokens = _told(logits, draw)
    log_sum = likeliest.logit + jnp.log(jnp.exp(logits - likeliest.logit).sum(-1, keepdims=True))
    return Drawn(token, _at(logits, token) - log_sum[:, 0], best_tokens, best - log_sum)


def _alone(
    row: jax.Array, logits: jax.Array, likeliest: _Likeliest, draw: Draw, seen: jax.Array
) -> tuple[jax.Array, ...]:
    """Token and most likely tokens of one row of the batch."""

    def of(column: Column) -> jax.Array:
        return lax.dynamic_slice_in_dim(jnp.asarray(column), row, 1)

    one: Draw = jax.tree.map(of, draw)
    token = of(likeliest.token)
    is_plain = (one.temperature <= 0.0).all() & ~_changes_logits(one)
    token = lax.cond(
        is_plain,
        lambda: token,
        lambda: _tokens(of(logits), _Likeliest(token, of(likeliest.logit)), one, lambda: of(seen)),
    )
    return token[0], *(column[0] for column in _told(logits, one, of))


def _tokens(logits: jax.Array, likeliest: _Likeliest, draw: Draw, seen: Callable[[], jax.Array]) -> jax.Array:
    """The drawn tokens, `[B]`."""

    def change() -> tuple[jax.Array, _Likeliest]:
        shaped = _shape(logits, draw, seen())
        return shaped, _likeliest(shaped)

    shaped, likeliest = lax.cond(_changes_logits(draw), change, lambda: (logits, likeliest))
    shaped = lax.optimization_barrier(shaped)
    is_greedy = jnp.asarray(draw.temperature) <= 0.0
    drawn = lax.cond(is_greedy.all(), lambda: likeliest.token, lambda: _random(shaped, likeliest.logit, draw))
    return jnp.where(is_greedy, likeliest.token, drawn)


def _told(
    logits: jax.Array, draw: Draw, of: Callable[[jax.Array], jax.Array] = lambda all_rows: all_rows
) -> tuple[jax.Array, jax.Array]:
    """The most likely tokens of the rows `of(logits)`, if one of them asks: logits and ids, `[B, MAX_TOP]`."""
    B, count = draw.num_top.shape[0], min(MAX_TOP, logits.shape[-1])
    return lax.cond(
        (jnp.asarray(draw.num_top) > 0).any(),
        lambda: largest(of(logits), count),
        lambda: (jnp.zeros((B, count), jnp.float32), jnp.zeros((B, count), jnp.int32)),
    )


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Log probability of `token` `[B]` under softmax of `logits` `[B, V]`."""
    top = logits.max(-1)
    return _at(logits, token) - top - jnp.log(jnp.exp(logits - top[:, None]).sum(-1))


def remembered(seen: jax.Array, token: jax.Array, active: Column) -> jax.Array:
    """`seen` after each active row drew its `token` `[B]`; the rows of `seen` may be more than B.

    An entry is twice the number of times that its token was drawn, plus 1 if it stands in the prompt.
    """
    rows = jnp.arange(token.shape[0])
    return seen.at[rows, token].add(2 * jnp.asarray(active).astype(jnp.int32))


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row of `[B, n]`, in descending order, and their indices.

    They lie in the `count` blocks with the largest maxima, which are found in the same way: much cheaper than
    `lax.top_k` of everything.
    """
    return _largest(values, count, _BLOCKS)


def _largest(values: jax.Array, count: int, widths: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    B, n = values.shape
    if not widths or n <= 2 * count * widths[0]:
        best, where = lax.top_k(values, count)
        return best, where
    width, *rest = widths
    blocks = _blocks(values, width, -jnp.inf)
    _, chosen = _largest(blocks.max(-1), count, tuple(rest))
    inside = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(B, -1)
    best, where = lax.top_k(inside, count)
    return best, jnp.take_along_axis(chosen, where // width, 1) * width + where % width


def _changes_logits(draw: Draw) -> jax.Array:
    penalized = (draw.presence != 0.0) | (draw.frequency != 0.0) | (draw.repetition != 1.0)
    return jnp.any(penalized) | jnp.any(draw.biases != 0.0)


def _shape(logits: jax.Array, draw: Draw, seen: jax.Array) -> jax.Array:
    biases = jnp.where(draw.step[:, None] < draw.bias_until, draw.biases, 0.0)
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, draw.bias_tokens].add(biases, mode="drop")
    times = seen >> 1
    repetition = jnp.where(seen > 0, draw.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    drawn = jnp.where(times > 0, draw.presence[:, None], 0.0)
    return logits - drawn - times.astype(jnp.float32) * draw.frequency[:, None]


def _random(shaped: jax.Array, top: jax.Array, draw: Draw) -> jax.Array:
    temperature = jnp.where(draw.temperature <= 0.0, 1.0, draw.temperature)[:, None]

    def weigh(logits: jax.Array) -> jax.Array:
        weights = jnp.exp((logits - top) / temperature)  # 1.0 for the most likely token
        return jnp.where(weights >= draw.min_p[:, None], weights, 0.0)

    V = shaped.shape[-1]
    count = min(_CANDIDATES, V)
    wanted = jnp.where(draw.top_k > 0, jnp.minimum(draw.top_k, V), V)
    has_top_k, has_top_p = wanted < V, jnp.asarray(draw.top_p) < 1.0
    best = lax.cond(
        (has_top_k | has_top_p).any(),
        lambda: largest(shaped, count)[0],
        lambda: jnp.zeros((shaped.shape[0], count), jnp.float32),
    )
    at_k = jnp.take_along_axis(best, jnp.minimum(wanted, count)[:, None] - 1, 1)[:, 0]
    threshold = jnp.where(has_top_k, at_k, -jnp.inf)
    threshold = lax.cond(
        (has_top_k & (wanted > count)).any(),
        lambda: jnp.where(has_top_k & (wanted > count), _reached_by(shaped, wanted), threshold),
        lambda: threshold,
    )
    weights = jnp.where(shaped >= threshold[:, None], weigh(shaped), 0.0)
    weights = lax.optimization_barrier(weights)

    # top-p by the candidates: the first place at which enough has come together
    enough = jnp.minimum(draw.top_p, 1.0) * weights.sum(-1)
    heap = jnp.cumsum(jnp.where(best >= threshold[:, None], weigh(best), 0.0), axis=-1)
    reached = (heap >= enough[:, None]).any(-1) | (has_top_k & (wanted <= count))
    last = jnp.minimum((heap < enough[:, None]).sum(-1), count - 1)
    at_p = jnp.take_along_axis(best, last[:, None], 1)[:, 0]
    weights = jnp.where((shaped >= jnp.where(has_top_p & reached, at_p, -jnp.inf)[:, None]), weights, 0.0)
    weights = lax.optimization_barrier(weights)
    return _draw(weights, draw, jnp.where(has_top_p & ~reached, enough, jnp.inf))


class _Attempt(NamedTuple):
    """Of rejection sampling: how many, and of each row the last token, what is out of question, and if it is good."""

    number: jax.Array
    token: jax.Array
    pivot: jax.Array
    done: jax.Array


def _draw(weights: jax.Array, draw: Draw, limit: jax.Array) -> jax.Array:
    """A token of each row, with probability as its weight, among those with less than `limit` above them."""

    def pick(pivot: jax.Array, attempt: jax.Array) -> jax.Array:
        return _search(
            jnp.where(weights > pivot[:, None], weights, 0.0), _uniform(draw.seed, draw.step, attempt)
        )

    def again(state: _Attempt) -> _Attempt:
        attempt, token, pivot, done = state
        weight = _at(weights, token)
        above = jnp.where(weights > weight[:, None], weights, 0.0).sum(-1)
        done = done | (above < limit)
        pivot = jnp.where(done, pivot, weight)
        token = lax.cond(done.all(), lambda: token, lambda: jnp.where(done, token, pick(pivot, attempt)))
        return _Attempt(attempt + 1, token, pivot, done)

    none = jnp.zeros(weights.shape[0], jnp.float32)
    token = _search(weights, _uniform(draw.seed, draw.step, jnp.zeros((), jnp.uint32)))
    state = _Attempt(jnp.ones((), jnp.uint32), token, none, jnp.isinf(limit))
    return lax.while_loop(lambda state: ~state.done.all(), again, state).token


def _reached_by(values: jax.Array, k: jax.Array) -> jax.Array:
    """A number that `k` elements of each row of `[B, n]` reach, and no others but those that equal the k-th.

    By bisection over integers that are ordered like floats, until one between the k-th and the next is met.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1) + ((low ^ high) & 1)  # rounded up
        above = (ordered >= middle[:, None]).sum(-1, dtype=jnp.int32)
        low, high = jnp.where(above >= k, middle, low), jnp.where(above > k, high, middle - 1)
        return low, jnp.where(above == k, low, high)

    low, _ = lax.while_loop(lambda b: (b[0] < b[1]).any(), halve, (ordered.min(-1), ordered.max(-1)))
    return lax.bitcast_convert_type(jnp.where(low < 0, low ^ 0x7FFFFFFF, low), jnp.float32)


def _uniform(seed: Column, step: Column, attempt: jax.Array) -> jax.Array:
    """A number in [0, 1) per row, from its seed, step and attempt only."""

    def one(seed: Column, step: Column) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([seed, step.astype(jnp.uint32)]), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, attempt), (), jnp.float32)

    return jax.vmap(one)(seed, step)


def _search(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The token whose share of the cumulative weight contains `uniform` `[B]`; never one of weight 0."""
    blocks = _blocks(weights, _COLUMNS, 0.0)
    block_ends = jnp.cumsum(blocks.sum(-1), axis=-1)
    target = uniform * block_ends[:, -1]
    block = _first_above(block_ends, target)
    before = jnp.where(block > 0, _at(block_ends, jnp.maximum(block - 1, 0)), 0.0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    column = _first_above(jnp.cumsum(inside, axis=-1), target - before)
    return (block * _COLUMNS + column).astype(jnp.int32)


def _first_above(ends: jax.Array, target: jax.Array) -> jax.Array:
    """Index of the first interval `[…, n]` that ends above `target`, at most the last non-empty one."""
    last_rise = jnp.where(ends < ends[:, -1:], 1, 0).sum(-1)  # first index that reaches the total
    return jnp.minimum((ends <= target[:, None]).sum(-1), last_rise)


def _likeliest(logits: jax.Array) -> _Likeliest:
    """Faster than argmax."""
    V, width = logits.shape[-1], _BLOCKS[0]
    blocks = _blocks(logits, width, -jnp.inf)
    largest_of_block = blocks.max(-1)
    top = largest_of_block.max(-1, keepdims=True)
    block = _first_equal(largest_of_block, top)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    return _Likeliest(jnp.minimum(block * width + _first_equal(inside, top), V - 1), top)


def _blocks(values: jax.Array, width: int, filler: float) -> jax.Array:
    """`[B, n]` as `[B, ⌈n / width⌉, width]`."""
    B, n = values.shape
    return jnp.pad(values, ((0, 0), (0, -n % width)), constant_values=filler).reshape(B, -1, width)


def _first_equal(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """The lowest index of each row of `[B, n]` that equals `wanted` `[B, 1]`; the last one if none does."""
    n = values.shape[-1]
    return jnp.where(values == wanted, jnp.arange(n, dtype=jnp.int32), n - 1).min(-1)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[b, index[b]]` for each row b of `[B, n]`."""
    return jnp.take_along_axis(values, index[:, None], axis=-1, mode="clip")[:, 0]

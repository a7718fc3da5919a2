import functools

import jax
import numpy as np
import pytest

from models import sampling
from models.draw import Draw

V = 515
LOGITS = np.random.default_rng(0).normal(size=(4, V)).astype(np.float32) * 3


def draw(rows, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, step=0):
    full = functools.partial(np.full, rows)
    return Draw(
        full(temperature, np.float32),
        full(top_k, np.int32),
        full(top_p, np.float32),
        np.broadcast_to(np.asarray(seed, np.uint32), rows).copy(),
        np.broadcast_to(np.asarray(step, np.int32), rows).copy(),
    )


sample = jax.jit(sampling.sample)


def many(logits, n, **how):
    """n draws from one row of logits, by n steps of one seed; in batches of 512, to compile once."""
    batch = np.broadcast_to(logits, (512, V)).copy()
    steps = np.arange(n).reshape(-1, 512)
    return np.concatenate([np.asarray(sample(batch, draw(512, step=step, **how))[0]) for step in steps])


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_greedy_takes_the_lowest_id_among_equals_and_its_log_probability():
    logits = LOGITS.copy()
    logits[0, [40, 300]] = 20.0
    tokens, logprobs = jax.jit(sampling.greedy)(logits)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert tokens[0] == 40
    np.testing.assert_allclose(logprobs, log_softmax(logits).max(-1), atol=1e-5)


def test_log_probabilities_are_those_of_the_unmodified_distribution():
    tokens, logprobs = sample(LOGITS, draw(4, temperature=0.5, top_k=3, top_p=0.9, seed=7))
    expected = log_softmax(LOGITS)[np.arange(4), np.asarray(tokens)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_temperature_zero_rows_are_greedy_beside_sampled_ones():
    how = draw(4, temperature=1.0)
    how.temperature[[1, 3]] = 0.0
    tokens, _ = sample(LOGITS, how)
    assert np.asarray(tokens)[[1, 3]].tolist() == LOGITS.argmax(-1)[[1, 3]].tolist()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_draws_all_of_the_k_best_and_nothing_else(top_k):
    best = set(np.argsort(-LOGITS[0])[:top_k].tolist())
    assert set(many(LOGITS[0], 512, top_k=top_k, temperature=2.0).tolist()) == best


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probabilities = np.exp(log_softmax(LOGITS[0]))
    order = np.argsort(-probabilities)
    size = int(np.searchsorted(np.cumsum(probabilities[order]), 0.5)) + 1
    drawn = set(many(LOGITS[0], 2048, top_p=0.5).tolist())
    assert drawn <= set(order[:size].tolist())
    assert len(drawn) > size // 2 > 0


def test_draws_follow_the_distribution():
    logits = np.full(V, -50.0, np.float32)
    logits[[3, 256, 514]] = np.log([0.2, 0.3, 0.5])
    tokens = many(logits, 4096)
    shares = [np.mean(tokens == token) for token in (3, 256, 514)]
    np.testing.assert_allclose(shares, [0.2, 0.3, 0.5], atol=0.03)


def test_a_draw_depends_on_seed_and_step_and_on_neither_slot_nor_neighbours():
    alone, _ = sample(LOGITS[:1], draw(1, seed=42, step=5))
    crowd = np.concatenate([LOGITS[1:], LOGITS[:1]])
    together, _ = sample(crowd, draw(4, seed=[1, 2, 3, 42], step=[0, 1, 2, 5]))
    assert int(alone[0]) == int(together[3])
    tokens = many(LOGITS[0], 512, temperature=2.0, seed=42)
    assert len(set(tokens.tolist())) > 16
    assert not np.array_equal(tokens, many(LOGITS[0], 512, temperature=2.0, seed=43))

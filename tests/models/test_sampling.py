from functools import partial

import jax
import numpy as np
import pytest

from models import sampling
from models.draw import EVER, FORBIDDEN, blank

V = 515
LOGITS = np.random.default_rng(0).normal(size=(4, V)).astype(np.float32) * 3


def draw(rows, **columns):
    """Rows that are alike, but for columns given as lists; temperature 1 if nothing is said of it."""
    out = blank(rows)
    for name, value in ({"temperature": 1.0} | columns).items():
        getattr(out, name)[:] = value
    return out


@partial(jax.jit, static_argnames="row_by_row")
def sample(logits, how, seen=None, row_by_row=False):
    seen = np.zeros(logits.shape, np.int32) if seen is None else seen
    drawn = sampling.sample(logits, how, seen, row_by_row=row_by_row)
    return drawn.token, drawn.logprob, drawn.top_tokens, drawn.top_logprobs


def many(logits, n, seen=None, **how):
    """n draws from one row of logits, by n steps of one seed; in batches of 512, to compile once."""
    V = len(logits)
    batch = np.broadcast_to(logits, (512, V)).copy()
    seen = np.broadcast_to(np.zeros(V, np.int32) if seen is None else seen, (512, V)).copy()
    steps = np.arange(n).reshape(-1, 512)
    return np.concatenate([np.asarray(sample(batch, draw(512, step=step, **how), seen)[0]) for step in steps])


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
    tokens, logprobs, *_ = sample(LOGITS, draw(4, temperature=0.5, top_k=3, top_p=0.9, seed=7))
    expected = log_softmax(LOGITS)[np.arange(4), np.asarray(tokens)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_temperature_zero_rows_are_greedy_beside_sampled_ones():
    how = draw(4, temperature=1.0)
    how.temperature[[1, 3]] = 0.0
    tokens, *_ = sample(LOGITS, how)
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
    alone, *_ = sample(LOGITS[:1], draw(1, seed=42, step=5))
    crowd = np.concatenate([LOGITS[1:], LOGITS[:1]])
    together, *_ = sample(crowd, draw(4, seed=[1, 2, 3, 42], step=[0, 1, 2, 5]))
    assert int(alone[0]) == int(together[3])
    tokens = many(LOGITS[0], 512, temperature=2.0, seed=42)
    assert len(set(tokens.tolist())) > 16
    assert not np.array_equal(tokens, many(LOGITS[0], 512, temperature=2.0, seed=43))


def expected(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probability of every token, by sorting all of them in float64."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[weights < min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0.0
    if top_p < 1.0:
        heap = np.cumsum(weights[order])
        weights[order[np.searchsorted(heap, top_p * heap[-1]) + 1 :]] = 0.0
    return weights / weights.sum()


FLAT = np.random.default_rng(1).normal(size=V).astype(np.float32) * 0.7


@pytest.mark.parametrize(
    "how",
    [
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.8, "temperature": 0.6, "min_p": 0.2},
        {"min_p": 0.3},
        {"top_p": 0.6},  # far more tokens than candidates: by rejection
        {"top_p": 0.9, "temperature": 1.8},
        {"top_k": 100},  # more than candidates: by bisection
        {"top_k": 200, "top_p": 0.5},  # by both
        {"top_k": 64},
        {"top_k": 65, "top_p": 0.99},
        {"top_k": 10_000},
        {"top_p": 1e-6},
        {"min_p": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("logits", [LOGITS[0], FLAT], ids=["peaked", "flat"])
def test_draws_have_the_distribution_that_sorting_gives(logits, how):
    n = 8192
    wanted = expected(logits, **how)
    counts = np.bincount(many(logits, n, **how), minlength=V)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(wanted > 0))
    error = np.abs(counts / n - wanted)
    assert (error <= 4.5 * np.sqrt(wanted * (1 - wanted) / n) + 3 / n).all()


def test_a_row_that_is_drawn_again_does_not_change_its_neighbours():
    """Rejection and bisection run for the batch; rows that need neither keep their token."""
    how = draw(4, seed=[1, 2, 3, 4], top_p=[0.5, 0.9, 1.0, 0.7], top_k=[0, 5, 0, 300])
    logits = np.stack([FLAT, LOGITS[1], LOGITS[2], FLAT])
    together = np.asarray(sample(logits, how)[0])
    for row in range(4):
        alone = sample(logits[row : row + 1], type(how)(*(column[row : row + 1] for column in how)))[0]
        assert int(alone[0]) == together[row]


def test_rows_drawn_one_by_one_are_those_drawn_together():
    """Neighbours that need every branch beside some that need none."""
    rng, B = np.random.default_rng(4), 4
    for round_ in range(48):
        logits = np.stack([FLAT if rng.random() < 0.5 else LOGITS[i] for i in range(B)])
        seen = rng.integers(0, 4, (B, V)).astype(np.int32)
        how = draw(
            B,
            temperature=rng.choice([0.0, 0.7, 1.5], B),
            top_k=rng.choice([0, 5, 300], B),
            top_p=rng.choice([1.0, 0.5, 0.9], B),
            min_p=rng.choice([0.0, 0.1], B),
            presence=rng.choice([0.0, 1.0], B),
            repetition=rng.choice([1.0, 1.3], B),
            num_top=rng.choice([0, 3], B),
            seed=np.arange(B),
            step=round_,
        )
        if round_ % 2:
            how.bias_tokens[1, 0], how.biases[1, 0] = logits[1].argsort()[-2], 5.0
        together, alone = sample(logits, how, seen), sample(logits, how, seen, row_by_row=True)
        asked = how.num_top > 0
        assert np.array_equal(together[0], alone[0])
        np.testing.assert_allclose(together[1], alone[1], atol=1e-5)
        assert np.array_equal(np.asarray(together[2])[asked], np.asarray(alone[2])[asked])
        np.testing.assert_allclose(np.asarray(together[3])[asked], np.asarray(alone[3])[asked], atol=1e-5)


def test_equal_logits_at_the_edge_are_all_kept():
    logits = np.full(V, -20.0, np.float32)
    logits[[7, 9, 200, 400]] = [3.0, 2.0, 2.0, 2.0]
    assert set(many(logits, 512, top_k=2, temperature=2.0).tolist()) == {7, 9, 200, 400}


def test_the_largest_are_those_of_sorting():
    values = np.random.default_rng(2).permutation(4 * 3000).reshape(4, 3000).astype(np.float32)
    for count in (1, 20, 64, 150, 1000):
        best, where = jax.jit(sampling.largest, static_argnums=1)(values, count)
        order = np.argsort(-values, axis=1)[:, :count]
        assert np.array_equal(where, order)
        assert np.array_equal(best, np.take_along_axis(values, order, 1))


@pytest.mark.parametrize("k", [1, 2, 300, V])
def test_bisection_finds_what_k_of_both_signs_reach(k):
    values = np.stack([FLAT, -np.abs(FLAT), np.abs(FLAT), LOGITS[0] * 1e30, np.round(FLAT)])
    found = np.asarray(jax.jit(sampling._reached_by)(values, np.full(5, k, np.int32)))
    kth = np.sort(values, axis=1)[:, -k]
    assert np.array_equal(values >= found[:, None], values >= kth[:, None])


def best_of(logits, seen=None, **how):
    seen = np.zeros((1, V), np.int32) if seen is None else seen[None]
    return int(sample(logits[None], draw(1, temperature=0.0, **how), seen)[0][0])


def test_penalties_look_back_as_they_say():
    logits = np.zeros(V, np.float32)
    logits[[3, 5, 8]] = [4.0, 3.5, 3.0]
    seen = np.zeros(V, np.int32)
    assert best_of(logits, seen, presence=2.0, frequency=2.0, repetition=2.0) == 3
    seen[3] = 2  # drawn once
    assert best_of(logits, seen, presence=0.6) == 5
    assert best_of(logits, seen, frequency=0.4) == 3
    seen[3] = 4  # twice
    assert best_of(logits, seen, presence=0.4) == 3
    assert best_of(logits, seen, frequency=0.4) == 5
    seen[3] = 1  # only in the prompt
    assert best_of(logits, seen, presence=2.0, frequency=2.0) == 3
    assert best_of(logits, seen, repetition=1.2) == 5
    assert best_of(-logits - 1, seen, repetition=0.5) == 0  # negative logits are multiplied
    assert best_of(logits, seen, presence=-2.0) == 3
    seen[8] = 2
    assert best_of(logits, seen, presence=-2.0) == 8


def test_a_bias_is_added_until_its_step():
    biases = {"bias_tokens": np.full((1, 320), 2**31 - 1), "biases": np.zeros((1, 320)), "bias_until": EVER}
    biases["bias_tokens"][0, :2], biases["biases"][0, :2] = [11, 12], [50.0, 60.0]
    assert best_of(LOGITS[0], **biases) == 12
    biases["bias_until"] = np.full((1, 320), EVER)
    biases["bias_until"][0, 1] = 3
    assert [best_of(LOGITS[0], step=step, **biases) for step in range(5)] == [12, 12, 12, 11, 11]
    biases["biases"][0, :2] = FORBIDDEN
    biases["bias_tokens"][0, 0] = LOGITS[0].argmax()
    assert best_of(LOGITS[0], **biases) == np.argsort(-LOGITS[0])[1]


def test_log_probabilities_are_of_the_unchanged_logits_whatever_changes_them():
    how = draw(4, presence=2.0, repetition=3.0, temperature=0.0, num_top=[0, 3, 20, 1])
    tokens, logprobs, top, top_logprobs = sample(LOGITS, how, np.full((4, V), 3, np.int32))
    whole = log_softmax(LOGITS)
    np.testing.assert_allclose(logprobs, whole[np.arange(4), np.asarray(tokens)], atol=1e-5)
    order = np.argsort(-LOGITS, axis=1)[:, :20]
    assert np.array_equal(top, order)
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(whole, order, 1), atol=1e-5)


def test_a_forbidden_vocabulary_still_gives_a_token():
    logits = np.zeros((1, 200), np.float32)
    how = draw(1)
    how.bias_tokens[0, :200], how.biases[0, :200] = np.arange(200), FORBIDDEN
    token, logprob, *_ = sample(logits, how)
    assert 0 <= int(token[0]) < 200
    assert float(logprob[0]) == pytest.approx(-np.log(200), abs=1e-5)


def test_what_was_drawn_is_remembered_for_active_rows_only():
    seen = np.zeros((3, V), np.int32)
    seen[:, 7] = 1
    after = np.asarray(jax.jit(sampling.remembered)(seen, np.array([7, 9]), np.array([True, False])))
    assert after[0, 7] == 3
    assert after.sum() == 3 + 1 + 1

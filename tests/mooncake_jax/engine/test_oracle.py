import copy

import numpy as np
import pytest

from mooncake_jax.engine.oracle import Monolith
from mooncake_jax.equality import TOLERANCES, compare
from mooncake_jax.request import Request, Sampling

PROMPT = np.random.default_rng(1).integers(0, 515, 50).tolist()


def request(**changes):
    return Request(request_id="r", tokens=PROMPT, **({"max_tokens": 12} | changes))


@pytest.fixture(params=["float32", "bfloat16"])
def any_pair(request):
    return request.getfixturevalue("pair" if request.param == "float32" else "bf16_pair")


def test_greedy_answers_follow_the_dense_reference(pair):
    answer = Monolith(pair.prefill, pair.decode).generate(request())
    assert answer.finish == "length"
    dense = pair.dense([*PROMPT, *answer.tokens])[len(PROMPT) - 1 : -1]
    assert answer.tokens == dense.argmax(-1).tolist()
    np.testing.assert_allclose(answer.logprobs, dense.max(-1), atol=1e-4)


def test_scores_are_those_of_the_dense_reference(pair):
    answer = [3, 500, 7]
    scores = Monolith(pair.prefill, pair.decode).score(PROMPT, answer)
    dense = pair.dense([*PROMPT, *answer])[len(PROMPT) - 1 : -1]
    ordered = np.sort(dense, axis=-1)
    np.testing.assert_allclose(scores.logprobs, dense[np.arange(3), answer], atol=1e-4)
    assert scores.best.tolist() == dense.argmax(-1).tolist()
    np.testing.assert_allclose(scores.margins, ordered[:, -1] - ordered[:, -2], atol=1e-4)


def test_a_stop_token_is_the_last_token(pair):
    oracle = Monolith(pair.prefill, pair.decode)
    full = oracle.generate(request())
    third = full.tokens[2]
    stopped = oracle.generate(request(stop_token_ids=[third]))
    end = full.tokens.index(third) + 1
    assert stopped.finish == "stop"
    assert stopped.tokens == full.tokens[:end]
    assert oracle.generate(request(stop_token_ids=[full.tokens[0]])).tokens == full.tokens[:1]


def test_a_cancelled_answer_has_no_finish(pair):
    heard = []
    answer = Monolith(pair.prefill, pair.decode).generate(
        request(), on_token=lambda token, logprob, top: heard.append(token), cancelled=lambda: len(heard) >= 4
    )
    assert answer.finish is None
    assert answer.tokens == heard
    assert len(heard) == 4


def test_sampled_answers_repeat_by_seed(pair):
    oracle = Monolith(pair.prefill, pair.decode)
    one, two, other = (
        oracle.generate(request(sampling=Sampling(temperature=1.0, top_p=0.95, seed=seed))).tokens
        for seed in (5, 5, 6)
    )
    assert one == two != other


def test_what_does_not_fit_is_refused(pair):
    with pytest.raises(ValueError, match="112"):
        Monolith(pair.prefill, pair.decode).generate(request(max_tokens=63))


def test_the_oracle_equals_itself_and_two_swapped_layers_exceed_ten_tolerances(any_pair):
    """The rule can tell a broken build: decode with layers 1 and 2 swapped, scored by the right one."""
    oracle = Monolith(any_pair.prefill, any_pair.decode)
    answer = oracle.generate(request(max_tokens=40))
    right = compare(answer.tokens, answer.logprobs, oracle.score(PROMPT, answer.tokens), any_pair.dtype)
    assert right.equal, right.first_violation

    wrong = _with_two_layers_swapped(any_pair)
    broken = wrong.generate(request(max_tokens=40))
    report = compare(broken.tokens, broken.logprobs, oracle.score(PROMPT, broken.tokens), any_pair.dtype)
    assert not report.equal
    assert report.max_abs_dlogprob > 10 * TOLERANCES[any_pair.dtype].logprob


def _with_two_layers_swapped(pair):
    """The same compiled engines over other weights."""
    engines = []
    for engine in (pair.prefill, pair.decode):
        twin = copy.copy(engine)
        if engine is pair.prefill:
            twin._steps = copy.copy(engine._steps)
            twin._steps._layers = {
                how: swapped(groups, pair.cfg) for how, groups in engine._steps._layers.items()
            }
        else:
            twin._layers = swapped(engine._layers, pair.cfg)
        twin._reset()
        engines.append(twin)
    return Monolith(*engines)


def swapped(groups, cfg):
    """Groups of layers with the second and third layer in each other's place."""
    flat = [layer for group in groups for layer in group]
    flat[1], flat[2] = flat[2], flat[1]
    return [flat[i : i + cfg.layers_per_group] for i in range(0, len(flat), cfg.layers_per_group)]

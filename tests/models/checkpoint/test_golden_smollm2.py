"""The real model, from GGUF to logits, against values that transformers made (golden/make_golden.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.values import smollm2, smollm2_gguf

from models.checkpoint import Model, load_model
from models.config import preset
from models.llama import dense_logits

GOLDEN = smollm2()
LENGTH = 128  # every prompt padded to it: one compilation
logits_of = jax.jit(dense_logits, static_argnums=0)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(smollm2_gguf(), dtype="float32")


def padded_logits(model: Model, ids: list[int]) -> np.ndarray:
    """`[T, V]` of `ids`; later positions cannot change earlier ones."""
    tokens = jnp.asarray(ids + [0] * (LENGTH - len(ids)))
    return np.asarray(logits_of(model.cfg, model.params, tokens))[: len(ids)]


def test_the_config_is_the_preset(model):
    assert model.cfg == preset("smollm2-135m")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: repr(case["prompt"])[:30])
def test_logits_are_those_of_transformers(model, case):
    logits = padded_logits(model, case["ids"])
    order = np.argsort(-logits[-1])[: len(case["top_ids"])]
    np.testing.assert_allclose(logits[-1][case["top_ids"]], case["top_logits"], atol=1e-3)
    np.testing.assert_allclose(np.sort(logits[-1][order]), np.sort(case["top_logits"]), atol=1e-3)
    scored = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(case["ids"]) - 1), case["ids"][1:]]
    np.testing.assert_allclose(scored, case["logprobs"], atol=1e-3)


def test_the_greedy_answer_is_that_of_transformers(model):
    prompt, answer = model.tokenizer.encode(GOLDEN["greedy_prompt"]), GOLDEN["greedy"]["float32"]["ids"]
    chosen = padded_logits(model, prompt + answer).argmax(-1)
    assert chosen[len(prompt) - 1 : -1].tolist() == answer
    assert model.tokenizer.decode(answer) == " Paris.\n\nThe answer is: 2018-01-22 12:1"

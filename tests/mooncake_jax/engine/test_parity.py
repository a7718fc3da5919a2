"""The served steps on models of other shapes: log probabilities of transformers (golden/make_parity.py)."""

import dataclasses

import jax
import numpy as np
import pytest
from golden import parity
from golden.folders import parity_folder
from golden.values import parity_logits

from models.checkpoint import load_model
from models.llama import dense_logits
from models.platform import CPU
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine
from mooncake_jax.engine.oracle import Monolith
from mooncake_jax.request import Request

PLATFORM = dataclasses.replace(
    CPU, tile_tokens=32, prefill_key_tokens=(32, 32), decode_key_tokens=((32, 32),)
)


@pytest.mark.parametrize("name", ["biases", "heads_8_to_1"])
def test_prefill_and_decode_are_transformers_too(tmp_path, compile_cache, name):
    model = load_model(parity_folder(tmp_path, name), dtype="float32")
    how = {"dtype": "float32", "max_tokens": 224, "fingerprint": b"parity", "platform": PLATFORM}
    oracle = Monolith(
        JaxPrefillEngine(model.cfg, model.params, num_slots=1, **how),
        JaxDecodeEngine(model.cfg, model.params, num_slots=1, insert_blocks=2, **how),
    )
    oracle.warm_up()
    tokens = parity.tokens(name)
    for position, logits in parity_logits(name).items():
        expected = np.asarray(jax.nn.log_softmax(logits.astype(np.float32)))
        for target in (0, int(expected.argmax())):
            scores = oracle.score(tokens[: position + 1], [target])
            assert scores.logprobs[0] == pytest.approx(expected[target], abs=1e-3)
            assert scores.best[0] == expected.argmax()
    answer = oracle.generate(Request(request_id="r", tokens=tokens, max_tokens=8))
    whole = np.asarray([*tokens, *answer.tokens], np.int32)
    dense = np.asarray(
        jax.nn.log_softmax(jax.jit(dense_logits, static_argnums=0)(model.cfg, model.params, whole))
    )
    rows = dense[len(tokens) - 1 : -1]
    assert answer.tokens == rows.argmax(-1).tolist()
    np.testing.assert_allclose(answer.logprobs, rows.max(-1), atol=1e-3)

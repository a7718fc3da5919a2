"""Random models of every shape: the logits of transformers in float32 (golden/make_parity.py), from either format."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import parity
from golden.folders import gguf_file, parity_folder
from golden.values import parity_logits

from models.checkpoint import load_model
from models.llama import dense_logits
from models.rope import inverse_frequencies

logits_of = jax.jit(dense_logits, static_argnums=0)


@pytest.mark.parametrize("name", parity.SHORT)
def test_logits_are_those_of_transformers(tmp_path, name):
    model = load_model(parity_folder(tmp_path, name), dtype="float32")
    logits = np.asarray(logits_of(model.cfg, model.params, jnp.asarray(parity.tokens(name))))
    golden = parity_logits(name)
    assert sorted(golden) == sorted(parity.POSITIONS)
    for position, expected in golden.items():
        np.testing.assert_allclose(logits[position], expected, atol=1e-3)
        assert np.ptp(expected) > 2  # flat logits would prove nothing


@pytest.mark.parametrize("name", parity.SHORT)
def test_a_gguf_of_the_same_weights_is_the_same_model(tmp_path, name):
    folder = load_model(parity_folder(tmp_path / "hf", name), dtype="float32")
    about, divisors = {}, None
    scaling = folder.cfg.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        about = {"llama.rope.scaling.original_context_length": scaling.original_max_position}
        divisors = inverse_frequencies(replace(folder.cfg, rope_scaling=None)) / inverse_frequencies(
            folder.cfg
        )
    path = gguf_file(tmp_path / "m.gguf", folder.cfg, parity.tensors(name), fields=about, rope_freqs=divisors)
    ours = load_model(path, dtype="float32")
    assert ours.cfg == folder.cfg
    assert ours.fingerprint == folder.fingerprint

"""RoPE scaling that is read must be used: real positions to 20,000, against transformers.

lablup/mlxcel#1355, unslothai/unsloth PR#6197, ggml-org/llama.cpp PR#8676: short prompts fine, long ones decay.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from golden import parity
from golden.folders import parity_folder
from golden.values import parity_logits

from models.checkpoint import load_model
from models.platform import CPU
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine

TILE = 512
PLATFORM = dataclasses.replace(CPU, tile_tokens=TILE)


def log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("name", [name for name in parity.LONG if name != "long_plain"])
def test_log_probabilities_at_every_distance_are_those_of_transformers(
    tmp_path, compile_cache, monkeypatch, name
):
    monkeypatch.setattr("mooncake_jax.engine.jax_prefill._SMALLEST_TILE", TILE)  # compile one size only
    model = load_model(parity_folder(tmp_path, name), dtype="float32")
    tokens = np.asarray(parity.tokens(name), np.int32)
    engine = JaxPrefillEngine(
        model.cfg,
        model.params,
        dtype="float32",
        num_slots=1,
        max_tokens=-(-tokens.size // TILE) * TILE,
        fingerprint=b"long",
        platform=PLATFORM,
    )
    engine.warm_up()
    golden = parity_logits(name)
    assert max(golden) == tokens.size - 1 == 20_000
    for start in range(0, tokens.size, TILE):
        tile = tokens[start : start + TILE]
        here = [position for position in golden if start <= position < start + TILE]
        for target in {0, *(int(golden[position].argmax()) for position in here)}:
            *_, scores = engine.prefill(0, tile, start, targets=np.full(tile.shape, target, np.int32))
            for position in here:
                expected = log_softmax(golden[position])
                assert scores.logprobs[position - start] == pytest.approx(expected[target], abs=1e-3)
                assert scores.top_tokens[position - start, 0] == expected.argmax()


def test_the_golden_values_would_show_another_scaling():
    """Same weights and prompt under every scaling: log probabilities move by far more than the tolerance."""
    rows = {name: parity_logits(name) for name in parity.LONG}
    for position in (5000, 10_000, 15_000, 20_000):
        seen = [log_softmax(rows[name][position]) for name in parity.LONG]
        apart = [np.abs(a - b).max() for i, a in enumerate(seen) for b in seen[:i]]
        assert min(apart) > 0.02, position

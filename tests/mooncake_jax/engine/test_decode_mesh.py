"""Decode over devices that share the heads gives what one device gives."""

import jax
import numpy as np
import pytest

from models import draw as draws
from models import llama
from models.config import preset
from models.sharding import MeshShape
from mooncake_jax.engine.contract import BatchRows
from mooncake_jax.engine.draw_rows import fill
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.request import Sampling

CFG, MAX_TOKENS, Z, SLOTS = preset("tiny"), 48, 16, 2
HOW = {"dtype": "float32", "num_slots": SLOTS, "max_tokens": MAX_TOKENS, "fingerprint": b"tiny"}


@pytest.fixture(scope="module")
def params():
    return llama.init_params(CFG, 0, "float32")


@pytest.fixture(scope="module")
def engines(params):
    alone = JaxDecodeEngine(CFG, params, insert_blocks=1, **HOW)
    shared = JaxDecodeEngine(CFG, params, insert_blocks=1, mesh=MeshShape(tensor=2), **HOW)
    for engine in (alone, shared):
        engine.warm_up()
    return alone, shared


def run(engine, blocks, steps=6):
    """Tokens, log probabilities, and the blocks that were full at the end, for a greedy and a penalised row."""
    samplings = (Sampling(), Sampling(temperature=0.8, seed=3, repetition_penalty=1.3))
    draw = draws.blank(SLOTS)
    rows = BatchRows(np.ones(SLOTS, np.bool_), np.array([5, 7], np.int32), np.full(SLOTS, Z, np.int32), draw)
    for slot, sampling in enumerate(samplings):
        engine.insert(slot, 0, blocks[slot : slot + 1])
        engine.remember(slot, [5, 7, 9], [])
        fill(draw, slot, sampling)
    tokens, logprobs = [], []
    for step in range(steps):
        draw.step[:] = step
        drawn = engine.generate(rows)
        tokens.append(drawn.tokens.copy())
        logprobs.append(drawn.logprobs.copy())
        rows = rows._replace(tokens=drawn.tokens, positions=rows.positions + 1)
    return np.array(tokens), np.array(logprobs), np.stack([engine.extract(slot, 1) for slot in range(SLOTS)])


def test_two_devices_give_what_one_gives(engines):
    alone, shared = engines
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((SLOTS, *alone.format.shape)).astype(np.float32)
    expected, got = run(alone, blocks), run(shared, blocks)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-3)
    written = slice(0, 6)
    np.testing.assert_allclose(got[2][..., written, :], expected[2][..., written, :], atol=1e-4)
    assert np.abs(expected[2][..., written, :]).max() > 0.1
    for slot in range(SLOTS):
        np.testing.assert_array_equal(shared.extract(slot, 0), blocks[slot])
    assert shared.compiles_after_ready == 0  # the process count of `alone` has the warm-up of `shared`


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ("stage:2", "decode is shared by tensor alone"),
        ("data:2", "decode is shared by tensor alone"),
        ("tensor:4", "2 KV heads do not divide over tensor:4"),
        ("tensor:2", "2 devices are needed, there are 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_reason(params, mesh, reason):
    with pytest.raises(ValueError, match=reason):
        JaxDecodeEngine(CFG, params, mesh=MeshShape.parse(mesh), devices=jax.devices()[:1], **HOW)

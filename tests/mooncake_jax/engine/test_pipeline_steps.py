"""CPP is exact: logits and KV equal the single-device step, for any stages, heads per device, chunks and prefix."""

import functools

import jax
import numpy as np
import pytest
from e2e.pipelined import NUM_SLOTS, TOLERANCE, Request, Scene, Z
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from models import ticks
from models.sharding import MeshShape
from mooncake_jax.engine.compiles import process_compiles
from mooncake_jax.engine.pipeline_steps import PipelineSteps

SIZES, MAX_TOKENS = (16, 64), 128
REQUESTS = st.lists(
    st.builds(Request, st.sampled_from([0, 1, 5]), st.integers(1, 80), st.sampled_from([16, 24, 64])),
    min_size=1,
    max_size=NUM_SLOTS,
)
SHAPE = MeshShape(stage=2, tensor=2)
LONG_THEN_SHORT = [Request(0, 80, 16), Request(5, 17, 16)]


@functools.cache
def scene(num_layers: int) -> Scene:
    return Scene(num_layers, SIZES, MAX_TOKENS)


@pytest.mark.parametrize(
    ("shape", "num_layers"),
    [(SHAPE, 4), (MeshShape(stage=4, tensor=2), 4), (MeshShape(stage=8), 8)],
    ids=str,
)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1000), requests=REQUESTS)
@example(seed=0, requests=LONG_THEN_SHORT)  # without draining in between
@example(seed=1, requests=[Request(1, 64, 64), Request(0, 1, 16)])
def test_logits_and_kv_equal_the_single_device_step(shape, num_layers, seed, requests):
    assert scene(num_layers).worst(shape, seed, requests) <= TOLERANCE


def test_no_length_compiles_anything_after_the_first_run():
    scene(4).worst(SHAPE, 0, LONG_THEN_SHORT)
    before = process_compiles().total
    for seed, new in enumerate((1, 15, 16, 17, 63, 64, 80)):
        scene(4).worst(SHAPE, seed, [Request(seed % 2, new, 64), Request(2, new, 24)])
    assert process_compiles().total == before


def test_the_cache_is_updated_in_place():
    """No tick copies the pages of a layer: case 57. (A donated buffer that was not used is a warning, so an error.)"""
    cfg, tensor = scene(4).cfg, SHAPE.tensor
    pages = f"[{NUM_SLOTS},{scene(4).num_pages},{cfg.num_kv_heads // tensor},2,{Z},{cfg.head_dim}]"
    for size in SIZES:
        text = scene(4).steps(SHAPE).compiled_text(size)
        updates = [line for line in text.splitlines() if pages in line]
        assert updates
        assert not [line for line in updates if " copy(" in line or "copy-start" in line]


@pytest.mark.parametrize("how", ["swapped chunks", "one tick late", "activations go backwards"])
def test_a_wrong_schedule_is_a_wrong_result(monkeypatch, how):
    shape, requests = MeshShape(stage=4, tensor=2), LONG_THEN_SHORT
    whole = scene(4)
    if how == "swapped chunks":  # two chunks of a prompt enter in the wrong order

        def cut(*args, cut=ticks.cut):
            first, second, *rest = cut(*args)
            return [second, first, *rest]

        monkeypatch.setattr(ticks, "cut", cut)
    elif how == "one tick late":  # stage 1 is told the chunk that it had before

        def stream(chunks, num_stages, stream=ticks.stream):
            before = None
            for tick in stream(chunks, num_stages):
                yield (tick[0], before, *tick[2:])
                before = tick[1]

        monkeypatch.setattr(ticks, "stream", stream)
    else:  # the activations of other stages

        def run(self, tick, tokens, run=PipelineSteps.tick):
            self._x = jax.device_put(np.roll(np.asarray(self._x), 1, axis=0), self._x.sharding)
            return run(self, tick, tokens)

        monkeypatch.setattr(PipelineSteps, "tick", run)
    assert whole.worst(shape, 0, requests) > 100 * TOLERANCE

"""The engine on a mesh gives what the engine on one device gives, and its pipeline does not drain between tiles."""

import itertools

import numpy as np
import pytest

from models import llama
from models.config import preset
from models.sharding import MeshShape
from mooncake_jax.engine.contract import GroupKV, Sampled
from mooncake_jax.engine.local_stages import local_pipeline
from mooncake_jax.engine.pipeline_prefill import PipelinePrefillEngine
from mooncake_jax.engine.pipeline_steps import PipelineSteps
from mooncake_jax.request import Sampling

CFG, MAX_TOKENS, Z, X = preset("tiny"), 112, 16, 2
PROMPT = np.random.default_rng(0).integers(0, CFG.vocab_size, 75).astype(np.int32)
OTHER = np.random.default_rng(1).integers(0, CFG.vocab_size, 33).astype(np.int32)
HOW = {"dtype": "float32", "num_slots": 2, "max_tokens": MAX_TOKENS, "fingerprint": b"tiny"}


@pytest.fixture(scope="module")
def piped(pair) -> PipelinePrefillEngine:
    engine = local_pipeline(pair.cfg, pair.params, mesh=MeshShape(stage=X, tensor=2), chunk_tokens=Z, **HOW)
    engine.warm_up()
    return engine


def blocks_of(form, items, count):
    """KV blocks `[count, L, K, 2, Z, H]` and the last item of a prefill."""
    blocks, drawn, groups = np.zeros((count, *form.shape), form.item_dtype), None, []
    for item in items:
        if isinstance(item, GroupKV):
            groups.append(item.group)
            layers = slice(item.group * form.layers_per_group, (item.group + 1) * form.layers_per_group)
            blocks[item.first_block : item.first_block + len(item.blocks), layers] = item.blocks
        else:
            drawn = item
    return blocks, drawn, groups


def compute(engine, slot, tokens, start=0, load=None):
    form = engine.format
    count, drawn = form.num_blocks(len(tokens)), None
    blocks = np.zeros((count, *form.shape), form.item_dtype)
    for at in range(start, len(tokens), engine.tile_tokens):
        tile = tokens[at : at + engine.tile_tokens]
        sample = Sampling() if at + len(tile) == len(tokens) else None
        items = engine.prefill(slot, tile, at, load=load if at == start else None, sample=sample)
        new, drawn, groups = blocks_of(form, items, count)
        assert groups == list(range(form.num_groups))
        here = slice(at // Z, form.num_blocks(at + len(tile)))
        blocks[here] = new[here]
    assert isinstance(drawn, Sampled)
    return blocks, drawn


def loader(form, blocks, count):
    size = form.layers_per_group
    return lambda group: [blocks[i, group * size : (group + 1) * size] for i in range(count)]


def valid(blocks, num_tokens):
    """All rows that hold a token, of `[M, L, K, 2, Z, H]`, as `[tokens, …]`."""
    return blocks.transpose(0, 4, 1, 2, 3, 5).reshape(-1, *blocks.shape[1:4], blocks.shape[5])[:num_tokens]


@pytest.mark.parametrize("length", [1, 16, 33, 75])
def test_the_mesh_gives_what_one_device_gives(pair, piped, length):
    expected, token = compute(pair.prefill, 0, PROMPT[:length])
    got, drawn = compute(piped, 1, PROMPT[:length])
    np.testing.assert_allclose(valid(got, length), valid(expected, length), atol=1e-4)
    assert drawn.token == token.token
    assert drawn.logprob == pytest.approx(token.logprob, abs=1e-3)


@pytest.mark.parametrize("cached", [1, 4])
def test_a_cached_prefix_is_loaded_stage_by_stage(pair, piped, cached):
    expected, token = compute(pair.prefill, 0, PROMPT)
    load = loader(piped.format, expected, cached)
    got, drawn = compute(piped, 0, PROMPT, start=cached * Z, load=load)
    np.testing.assert_allclose(valid(got, 75)[cached * Z :], valid(expected, 75)[cached * Z :], atol=1e-4)
    assert drawn.token == token.token


def test_the_pipeline_does_not_drain_between_requests_that_are_open_together(pair, piped):
    expected = [compute(pair.prefill, 0, prompt)[0] for prompt in (PROMPT[:64], OTHER)]
    piped._busy = piped._cells = 0
    opened = [piped.prefill(slot, prompt, 0) for slot, prompt in enumerate((PROMPT[:64], OTHER))]
    for items, prompt, known in zip(opened, (PROMPT[:64], OTHER), expected, strict=True):
        got, _, _ = blocks_of(piped.format, items, len(known))
        np.testing.assert_allclose(valid(got, len(prompt)), valid(known, len(prompt)), atol=1e-4)
    chunks = 4 + 3
    assert piped.bubble_fraction == pytest.approx((X - 1) / (chunks + X - 1))


def test_what_load_raises_is_that_request_s_and_the_slot_serves_on(pair, piped):
    def load(group):
        raise KeyError("lost")

    broken = piped.prefill(0, OTHER[:16], Z, load=load)
    other = piped.prefill(1, OTHER, 0, sample=Sampling())
    expected, token = compute(pair.prefill, 0, OTHER)
    _, drawn, _ = blocks_of(piped.format, other, len(expected))
    assert drawn.token == token.token
    with pytest.raises(KeyError, match="lost"):
        next(broken)
    assert compute(piped, 0, OTHER)[1].token == token.token


def test_a_call_that_is_left_early_disturbs_nobody(pair, piped):
    left = piped.prefill(0, PROMPT[:64], 0)
    next(left)
    left.close()
    unread = piped.prefill(1, PROMPT[:64], 0)
    unread.close()
    assert not piped._entering
    with pytest.raises(ValueError, match="start 64 of slot 0, which holds 0"):
        piped.prefill(0, PROMPT[64:], 64)
    assert compute(piped, 0, OTHER)[1].token == compute(pair.prefill, 0, OTHER)[1].token


def test_after_a_failed_tick_the_engine_serves_on(pair, piped, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(PipelineSteps, "tick", lambda self, tick, tokens: 1 / 0)
        with pytest.raises(RuntimeError, match="every slot is empty now: division by zero"):
            list(piped.prefill(0, OTHER, 0))
    assert compute(piped, 0, OTHER)[1].token == compute(pair.prefill, 0, OTHER)[1].token


def test_nothing_compiles_after_warm_up(piped):
    for length, start in itertools.product((1, 15, 17, 48, 64), (0, 16, 48)):
        if start + length > MAX_TOKENS:
            continue
        block = np.zeros(piped.format.group_shape, piped.format.item_dtype)
        load = (lambda group, n=start // Z, block=block: [block] * n) if start else None
        list(piped.prefill(0, np.zeros(length, np.int32), start, load=load, sample=Sampling(seed=3)))
    assert piped.compiles_after_ready == 0


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ("stage:3", "4 layers do not divide over stage:3"),
        ("stage:4", "1 layers a stage are not whole layer groups of 2"),
        ("tensor:4", "2 KV heads do not divide over tensor:4"),
        ("data:2", "one prefill engine has one pipeline"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_reason(mesh, reason):
    with pytest.raises(ValueError, match=reason):
        local_pipeline(CFG, llama.init_params(CFG, 0, "float32"), mesh=MeshShape.parse(mesh), **HOW)


def test_prompts_are_not_scored(piped):
    with pytest.raises(ValueError, match="does not score prompts"):
        piped.prefill(0, OTHER, 0, targets=OTHER[1:])

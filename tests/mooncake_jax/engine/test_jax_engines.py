import numpy as np
import pytest

from models import draw as draws
from models.draw import MAX_TOP
from mooncake_jax.engine.contract import BatchRows, GroupKV
from mooncake_jax.engine.store_memory import StoreMemory
from mooncake_jax.request import Sampling

RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, 515, 75).astype(np.int32)


def compute(engine, slot, tokens, *, start=0, load=None, sample=None):
    """Prefill `tokens` from `start` on; returns their KV blocks `[M, L, K, 2, Z, H]` and the drawn token."""
    form, drawn = engine.format, None
    first = start // form.block_tokens
    blocks = np.zeros((form.num_blocks(len(tokens)) - first, *form.shape), form.item_dtype)
    for at in range(start, len(tokens), engine.tile_tokens):
        tile = tokens[at : at + engine.tile_tokens]
        last = at + engine.tile_tokens >= len(tokens)
        seen = []
        for item in engine.prefill(
            slot, tile, at, load=load if at == start else None, sample=sample if last else None
        ):
            if isinstance(item, GroupKV):
                seen.append(item.group)
                layers = slice(item.group * form.layers_per_group, (item.group + 1) * form.layers_per_group)
                blocks[item.first_block - first : item.first_block - first + len(item.blocks), layers] = (
                    item.blocks
                )
            else:
                drawn = item
        assert seen == list(range(form.num_groups))
    return blocks, drawn


def loader(form, blocks, num_blocks):
    """A `load` that hands out views of `blocks`, as a store would."""

    def load(group):
        layers = slice(group * form.layers_per_group, (group + 1) * form.layers_per_group)
        return [blocks[i, layers] for i in range(num_blocks)]

    return load


def insert(engine, slot, blocks):
    for first in range(0, len(blocks), engine.insert_blocks):
        engine.insert(slot, first, blocks[first : first + engine.insert_blocks])


def rows(engine, **columns):
    """Batch rows of given slots: `slot3=(token, position)`; the others hold junk that must not matter."""
    B = engine.num_slots
    out = BatchRows(
        active=np.zeros(B, np.bool_),
        tokens=np.full(B, 2**31 - 1, np.int32),
        positions=np.full(B, -7, np.int32),
        draw=draws.blank(B),
    )
    for name, (token, position) in columns.items():
        slot = int(name.removeprefix("slot"))
        out.active[slot], out.tokens[slot], out.positions[slot] = True, token, position
    return out


@pytest.mark.parametrize("length", [1, 16, 17, 32, 33, 75])
def test_first_token_equals_the_dense_reference(pair, length):
    _, drawn = compute(pair.prefill, 0, PROMPT[:length], sample=Sampling())
    expected = pair.dense(PROMPT[:length])[-1]
    assert drawn.token == expected.argmax()
    assert drawn.logprob == pytest.approx(expected.max(), abs=1e-4)


@pytest.mark.parametrize("length", [2, 16, 17, 32, 33, 75])
@pytest.mark.parametrize(("name", "tolerance"), [("pair", 1e-4), ("bf16_pair", 0.1)])
def test_scores_of_a_prompt_are_those_of_the_dense_reference(request, name, tolerance, length):
    """Tiles split over four and two devices by columns (to 16 tokens) and by rows, whole and in part."""
    pair = request.getfixturevalue(name)
    engine, scores = pair.prefill, []
    before = engine.compiles_after_ready
    for at in range(0, length, engine.tile_tokens):
        targets = PROMPT[at + 1 : min(at + engine.tile_tokens + 1, length)]
        if not targets.size:
            break
        items = engine.prefill(0, PROMPT[at : at + engine.tile_tokens][: length - at], at, targets=targets)
        scores.append(list(items)[-1])
    assert engine.compiles_after_ready == before
    logprobs, top_tokens, top_logprobs = map(np.concatenate, zip(*scores, strict=True))
    dense = pair.dense(PROMPT[:length])[:-1]
    np.testing.assert_allclose(logprobs, dense[np.arange(length - 1), PROMPT[1:length]], atol=tolerance)
    np.testing.assert_allclose(top_logprobs, -np.sort(-dense, axis=1)[:, :MAX_TOP], atol=tolerance)
    of_top = np.take_along_axis(dense, top_tokens, 1)
    np.testing.assert_allclose(of_top, top_logprobs, atol=tolerance)
    assert all(len(set(row)) == MAX_TOP for row in top_tokens.tolist())


@pytest.mark.parametrize("prefix_blocks", [1, 3, 4])
def test_a_loaded_prefix_gives_what_computing_it_gives(pair, prefix_blocks):
    engine = pair.prefill
    blocks, drawn = compute(engine, 0, PROMPT, sample=Sampling())
    compute(engine, 1, PROMPT[::-1].copy())  # stale KV in the other slot
    start = prefix_blocks * 16
    tail, redrawn = compute(
        engine, 1, PROMPT, start=start, load=loader(engine.format, blocks, prefix_blocks), sample=Sampling()
    )
    np.testing.assert_allclose(tail, blocks[prefix_blocks:], atol=1e-4)
    assert redrawn.token == drawn.token
    assert redrawn.logprob == pytest.approx(drawn.logprob, abs=1e-4)


def put(memory, form, blocks, places):
    """Blocks into slots of a store, and a `load` of them where they lie."""
    for place, block in zip(places, blocks, strict=False):
        memory[place] = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    held = memory.view(form.item_dtype).reshape(-1, *form.shape)

    def load(group):
        size = form.layers_per_group
        return [held[place, group * size : (group + 1) * size] for place in places]

    return load


@pytest.mark.parametrize(("start", "length"), [(16, 17), (16, 32), (64, 75), (32, 40)])
def test_a_short_tail_reads_its_prefix_where_the_store_keeps_it(pair, start, length):
    engine = pair.prefill
    blocks, drawn = compute(engine, 0, PROMPT[:length], sample=Sampling())
    compute(engine, 1, PROMPT[::-1].copy())  # stale KV in the other slot
    load = put(pair.memory, engine.format, blocks, [7, 2, 8, 1][: start // 16])
    tail, redrawn = compute(engine, 1, PROMPT[:length], start=start, load=load, sample=Sampling())
    np.testing.assert_allclose(tail, blocks[start // 16 :], atol=1e-4)
    assert redrawn.token == drawn.token
    assert redrawn.logprob == pytest.approx(drawn.logprob, abs=1e-4)
    with pytest.raises(ValueError, match="which holds 0 tokens"):  # nothing was copied into the slot
        engine.prefill(1, PROMPT[:16], start + 16)


@pytest.mark.parametrize("sample", [None, Sampling()])
def test_blocks_from_elsewhere_and_of_longer_prompts_are_copied(pair, sample):
    """A block outside of the store's memory, and tiles that others follow."""
    engine = pair.prefill
    blocks, _ = compute(engine, 0, PROMPT)
    load = put(pair.memory, engine.format, blocks, [3, 4])
    if sample is not None:
        inside, outside = load, loader(engine.format, blocks, 2)

        def load(group):
            return [inside(group)[0], outside(group)[1]]

    tail, _ = compute(engine, 1, PROMPT[:48], start=32, load=load, sample=sample)
    np.testing.assert_allclose(tail, blocks[2:3], atol=1e-4)
    if sample is None:
        _, drawn = compute(engine, 1, PROMPT[:64], start=48, sample=Sampling())
        assert drawn.token == pair.dense(PROMPT[:64])[-1].argmax()


def test_memory_of_another_kind_or_too_late_is_refused(pair):
    with pytest.raises(RuntimeError, match="of 9 slots, got 8"):
        pair.prefill.attach(pair.memory[:8])
    form = pair.prefill.format
    for memory in (
        np.zeros((3, form.nbytes + 2), np.uint8),
        np.zeros((3, form.nbytes // 2), np.uint16),
        np.zeros((6, form.nbytes), np.uint8)[::2],
    ):
        with pytest.raises(ValueError, match=rf"expected contiguous uint8 \[slots, {form.nbytes}\]"):
            StoreMemory(None, form, form.item_dtype, 8, memory)


def test_kv_of_an_unfinished_block_is_zero_past_the_last_token(pair):
    blocks, _ = compute(pair.prefill, 0, PROMPT[:18])
    assert np.abs(blocks[1, ..., :2, :]).min(axis=-1).max() > 0
    assert not blocks[1, ..., 2:, :].any()


def test_two_slots_do_not_mix(pair):
    engine, other = pair.prefill, RNG.integers(0, 515, 75).astype(np.int32)
    for at in (0, 32, 64):
        for slot, tokens in ((0, PROMPT), (1, other)):
            items = list(
                engine.prefill(slot, tokens[at : at + 32], at, sample=Sampling() if at == 64 else None)
            )
            if at == 64:
                assert items[-1].token == pair.dense(tokens[:75])[-1].argmax()


def test_decode_follows_the_dense_reference_beside_busy_neighbours(pair):
    blocks, _ = compute(pair.prefill, 0, PROMPT[:60])
    others, _ = compute(pair.prefill, 1, PROMPT[20:50])
    insert(pair.decode, 1, blocks)
    insert(pair.decode, 0, others)
    dense = pair.dense(PROMPT)
    for i in range(60, 75):
        columns = {"slot1": (PROMPT[i], i)} | ({"slot0": (9, 30)} if i % 2 else {})
        tokens, logprobs, *_ = pair.decode.generate(rows(pair.decode, **columns))
        assert tokens[1] == dense[i].argmax()
        assert logprobs[1] == pytest.approx(dense[i].max(), abs=1e-4)


def test_an_inactive_slot_is_not_written(pair):
    blocks, _ = compute(pair.prefill, 0, PROMPT[:32])
    insert(pair.decode, 0, blocks)
    insert(pair.decode, 2, blocks)
    pair.decode.generate(rows(pair.decode, slot2=(5, 32)))
    for block in range(2):
        assert np.array_equal(pair.decode.extract(0, block), blocks[block])


def test_extract_gives_what_prefill_would_have_computed(pair):
    blocks, _ = compute(pair.prefill, 0, PROMPT[:48])
    insert(pair.decode, 2, blocks[:2])
    for i in range(32, 48):
        pair.decode.generate(rows(pair.decode, slot2=(PROMPT[i], i)))
    taken = pair.decode.extract(2, 2)
    np.testing.assert_allclose(taken, blocks[2], atol=1e-4)
    pair.decode.generate(rows(pair.decode, slot2=(0, 47)))
    np.testing.assert_allclose(taken, blocks[2], atol=1e-4)  # an array of its own


def test_inserted_memory_may_be_reused_at_once(pair):
    blocks, _ = compute(pair.prefill, 0, PROMPT[:32])
    staging = blocks.copy()
    pair.decode.insert(0, 0, staging)
    staging[:] = 1e3
    assert np.array_equal(pair.decode.extract(0, 1), blocks[1])


def test_a_draw_is_the_same_in_every_slot_and_batch(pair):
    blocks, _ = compute(pair.prefill, 0, PROMPT[:32])
    drawn = []
    for slot in range(3):
        insert(pair.decode, slot, blocks)
        batch = rows(pair.decode, **{f"slot{slot}": (5, 32)})
        batch.draw.temperature[:], batch.draw.seed[:], batch.draw.step[:] = 1.0, 1234, 3
        drawn.append(int(pair.decode.generate(batch)[0][slot]))
    assert len(set(drawn)) == 1


def test_nothing_compiles_after_warm_up(pair):
    before = pair.prefill.compiles_after_ready
    for length in range(1, 40, 3):
        compute(pair.prefill, 0, PROMPT[:length], sample=Sampling(temperature=0.7, seed=length))
    blocks, _ = compute(pair.prefill, 0, PROMPT)
    compute(pair.prefill, 1, PROMPT, start=64, load=loader(pair.prefill.format, blocks, 4), sample=Sampling())
    insert(pair.decode, 0, blocks[:3])
    batch = rows(pair.decode, slot0=(1, 48))
    batch.draw.temperature[:] = 0.5
    pair.decode.generate(batch)
    assert pair.prefill.compiles_after_ready == before


@pytest.mark.parametrize(
    ("slot", "tokens", "start", "message"),
    [
        (2, [1], 0, "slot 2"),
        (0, [], 0, r"\(0,\)"),
        (0, [1] * 33, 0, "32"),
        (0, [515], 0, "vocabulary"),
        (0, [-1], 0, "vocabulary"),
        (0, [1.5], 0, "integers"),
        (0, [1], 8, "multiple"),
        (0, [1] * 17, 96, "positions 96"),
        (0, [1], 64, "holds 0"),
    ],
)
def test_prefill_refuses_what_is_out_of_range(pair, slot, tokens, start, message):
    compute(pair.prefill, 0, PROMPT[:1])
    pair.prefill._filled[:] = 0
    with pytest.raises(ValueError, match=message):
        pair.prefill.prefill(slot, np.asarray(tokens), start)


def test_a_failing_load_passes_through_and_the_slot_serves_on(pair):
    def load(group):
        if group == 1:
            raise ConnectionError("gone")
        return [np.zeros(pair.prefill.format.group_shape, np.float32)]

    with pytest.raises(ConnectionError, match="gone"):
        list(pair.prefill.prefill(0, PROMPT[:4], 16, load=load))
    with pytest.raises(ValueError, match="2 prefix blocks"):
        list(pair.prefill.prefill(0, PROMPT[:4], 16, load=lambda group: load(0) * 2))
    with pytest.raises(ValueError, match="expected"):
        list(pair.prefill.prefill(0, PROMPT[:4], 16, load=lambda group: [np.zeros((1,), np.float32)]))
    _, drawn = compute(pair.prefill, 0, PROMPT[:20], sample=Sampling())
    assert drawn.token == pair.dense(PROMPT[:20])[-1].argmax()


def test_an_abandoned_prefill_leaves_the_slot_usable(pair):
    blocks, _ = compute(pair.prefill, 1, PROMPT[:64])
    half_done = pair.prefill.prefill(0, PROMPT[64:70], 64, load=loader(pair.prefill.format, blocks, 4))
    next(half_done)
    half_done.close()
    _, drawn = compute(pair.prefill, 0, PROMPT[:20], sample=Sampling())
    assert drawn.token == pair.dense(PROMPT[:20])[-1].argmax()


def test_after_a_failed_step_the_engines_serve_on_and_lost_kv_is_refused(pair, monkeypatch):
    def fail(*args):
        for layer in args[2]:
            layer.delete()  # as a failed donated call leaves it
        raise RuntimeError("device lost")

    prefill, decode = pair.prefill, pair.decode
    blocks, _ = compute(prefill, 1, PROMPT[:32])
    with monkeypatch.context() as patch:
        steps = prefill._steps
        patch.setattr(steps, "_programs", steps._programs._replace(group=dict.fromkeys(prefill._tiles, fail)))
        with pytest.raises(RuntimeError, match="device lost"):
            compute(prefill, 0, PROMPT[:10])
    with pytest.raises(ValueError, match="holds 0"):
        prefill.prefill(1, PROMPT[32:40], 32)
    _, drawn = compute(prefill, 0, PROMPT[:20], sample=Sampling())
    assert drawn.token == pair.dense(PROMPT[:20])[-1].argmax()

    insert(decode, 0, blocks)
    with monkeypatch.context() as patch:
        patch.setattr(
            decode, "_programs", decode._programs._replace(group=dict.fromkeys(decode._batches, fail))
        )
        with pytest.raises(RuntimeError, match="device lost"):
            decode.generate(rows(decode, slot0=(1, 32)))
    with pytest.raises(ValueError, match="hold"):
        decode.generate(rows(decode, slot0=(1, 32)))
    insert(decode, 0, blocks)
    assert decode.generate(rows(decode, slot0=(PROMPT[32], 32)))[0][0] == pair.dense(PROMPT[:33])[-1].argmax()


def test_decode_refuses_what_is_out_of_range(pair):
    decode = pair.decode
    block = np.zeros((1, *decode.format.shape), np.float32)
    for slot, first, blocks, message in (
        (3, 0, block, "slot 3"),
        (0, 7, block, "blocks 7"),
        (0, -1, block, "blocks -1"),
        (0, 0, np.repeat(block, 3, 0), "3 blocks"),
        (0, 0, block.astype(np.float64), "float64"),
        (0, 0, block[:, :1], "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            decode.insert(slot, first, blocks)
    for columns, message in (
        ({"slot0": (515, 0)}, "515"),
        ({"slot0": (1, 112)}, "112"),
        ({"slot0": (1, -1)}, "-1"),
    ):
        with pytest.raises(ValueError, match=message):
            decode.generate(rows(decode, **columns))
    with pytest.raises(ValueError, match=r"rows\.tokens"):
        decode.generate(rows(decode)._replace(tokens=np.zeros(3, np.int64)))
    with pytest.raises(ValueError, match="block 9"):
        decode.extract(0, 9)


def test_bfloat16_stays_close_to_its_float32_reference(bf16_pair):
    blocks, drawn = compute(bf16_pair.prefill, 0, PROMPT[:60], sample=Sampling())
    assert blocks.dtype == np.uint16
    dense = bf16_pair.dense(PROMPT)
    assert abs(drawn.logprob - dense[59][drawn.token]) < 0.1
    insert(bf16_pair.decode, 0, blocks)
    for i in range(60, 75):
        tokens, logprobs, *_ = bf16_pair.decode.generate(rows(bf16_pair.decode, slot0=(PROMPT[i], i)))
        assert abs(logprobs[0] - dense[i][tokens[0]]) < 0.1


def test_every_device_has_a_cache_of_its_own_from_the_start(pair):
    pair.prefill._reset()
    for group in pair.prefill._cache:
        for pages in group:
            places = {shard.data.unsafe_buffer_pointer() for shard in pages.addressable_shards}
            assert len(places) == 4

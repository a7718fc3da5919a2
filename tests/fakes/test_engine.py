"""The fakes are worth their oracle: by hand, tile by tile, through a cache, and wrong when one byte is."""

import numpy as np
import pytest
from fakes.engine import FORMAT, FakeDecodeEngine, FakePrefillEngine, answer

from kvstore.block import BlockFormat
from models import draw as draws
from mooncake_jax.engine.contract import BatchRows, GroupKV, Sampled
from mooncake_jax.engine.draw_rows import fill
from mooncake_jax.request import Sampling

Z = FORMAT.block_tokens


def rows_of(
    engine: FakeDecodeEngine, slot: int, token: int, position: int, step: int, sampling: Sampling
) -> BatchRows:
    def row(value, dtype):
        column = np.zeros(engine.num_slots, dtype)
        column[slot] = value
        return column

    draw = draws.blank(engine.num_slots)
    fill(draw, slot, sampling)
    draw.step[slot] = step
    return BatchRows(
        active=row(True, bool),
        tokens=row(token, np.int32),
        positions=row(position, np.int32),
        draw=draw,
    )


def prefilled(
    tokens: list[int], sampling: Sampling, prefix: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """KV blocks `[M, L, K, 2, Z, H]` of the prompt, and the first token."""
    engine = FakePrefillEngine()
    kv = np.zeros((FORMAT.num_blocks(len(tokens)), *FORMAT.shape), FORMAT.item_dtype)
    start, load = 0, None
    if prefix is not None:
        start = len(prefix) * Z
        kv[: len(prefix)] = prefix
        load = lambda group: [b[group * 2 : group * 2 + 2] for b in prefix]  # noqa: E731
    first = -1
    while start < len(tokens):
        tile = np.array(tokens[start : start + engine.tile_tokens])
        last = start + len(tile) == len(tokens)
        for item in engine.prefill(1, tile, start, load=load, sample=sampling if last else None):
            if isinstance(item, Sampled):
                first = item.token
            else:
                assert isinstance(item, GroupKV)
                layers = slice(item.group * 2, item.group * 2 + 2)
                kv[item.first_block : item.first_block + len(item.blocks), layers] = item.blocks
        start, load = start + len(tile), None
    return kv, first


def decoded(kv: np.ndarray, length: int, first: int, count: int, sampling: Sampling) -> list[int]:
    engine, out = FakeDecodeEngine(), [first]
    for block in range(0, len(kv), engine.insert_blocks):
        engine.insert(2, block, kv[block : block + engine.insert_blocks])
    while len(out) < count:
        rows = rows_of(engine, 2, out[-1], length + len(out) - 1, len(out), sampling)
        out.append(int(engine.generate(rows)[0][2]))
    return out


def test_by_hand():
    one = BlockFormat(
        num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=1, dtype="float32", layers_per_group=1
    )
    # kv of token 5 at 0: [6, 7]; digest 1·(1·6 + 2·7) = 20: the first token.
    # kv of token 20 at 1: 20 + 1 + 20 = [41, 42]; digest 20 + 2·(41 + 2·42) = 270 = 19 mod 251.
    assert answer([5], 2, block_format=one) == [20, 19]


@pytest.mark.parametrize("length", [1, Z - 1, Z, Z + 1, 2 * Z, 2 * Z + 1, 5 * Z - 1, 5 * Z])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=42)])
def test_engines_answer_what_the_oracle_says(length, sampling):
    tokens = [(7 * i + length) % 90 for i in range(length)]
    kv, first = prefilled(tokens, sampling)
    assert decoded(kv, length, first, 6, sampling) == answer(tokens, 6, sampling=sampling)


def test_a_prefix_from_store_bytes_gives_the_same_answer():
    tokens = list(range(3 * Z + 1))
    kv, _ = prefilled(tokens, Sampling())
    again, first = prefilled(tokens, Sampling(), prefix=kv[:3].copy())
    assert first == answer(tokens, 1)[0]
    assert (again[:3] == kv[:3]).all()


@pytest.mark.parametrize("damage", ["byte", "layers", "kv", "blocks", "position"])
def test_damaged_kv_is_a_wrong_answer(damage):
    tokens = [(11 * i) % 90 for i in range(3 * Z)]
    kv, first = prefilled(tokens, Sampling())
    good = answer(tokens, 5)
    bad = kv.copy()
    if damage == "byte":
        bad[1, 2, 0, 1, 1, 1] += 1
    elif damage == "layers":
        bad[:, [0, 1]] = bad[:, [1, 0]]
    elif damage == "kv":
        bad[:] = bad[:, :, :, ::-1]
    elif damage == "blocks":
        bad[[0, 1]] = bad[[1, 0]]
    else:
        bad[:] = np.roll(bad, 1, axis=4)
    assert decoded(kv, len(tokens), first, 5, Sampling()) == good
    assert decoded(bad, len(tokens), first, 5, Sampling()) != good


def test_a_changed_token_changes_the_answer():
    tokens = list(range(20))
    differ = [answer([*tokens[:i], 99, *tokens[i + 1 :]], 3) != answer(tokens, 3) for i in range(20)]
    assert all(differ)

"""Keys name exactly one (fingerprint, salt, prefix); the byte layout is the one contract of all tiers."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import BlockFormat, chain_keys, root_key, tagged_digest

FORMAT = BlockFormat(
    num_layers=4, num_kv_heads=2, head_dim=8, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
ROOT = root_key(b"weights")


def test_a_layer_group_is_one_range_of_a_block():
    block = np.arange(FORMAT.nbytes // 2, dtype=FORMAT.item_dtype).reshape(FORMAT.shape)
    raw = block.tobytes()
    for group in range(FORMAT.num_groups):
        start = FORMAT.group_offset(group)
        piece = np.frombuffer(raw[start : start + FORMAT.group_nbytes], FORMAT.item_dtype).reshape(
            FORMAT.group_shape
        )
        np.testing.assert_array_equal(piece, block[2 * group : 2 * group + 2])
    with pytest.raises(IndexError, match="layer group 2 of 2"):
        FORMAT.group_offset(2)


def test_sizes_of_the_presets_are_those_of_the_paper_and_the_demo_model():
    llama70b = BlockFormat(80, 8, 128, 256, "bfloat16", 8)
    assert llama70b.nbytes == 256 * 320 * 1024  # 320 KB a token (paper.md, Table 1)
    smollm2 = BlockFormat(30, 3, 64, 32, "bfloat16", 6)
    assert smollm2.nbytes == 32 * 23_040


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "int8"}, "int8"), ({"layers_per_group": 3}, "groups of 3"), ({"head_dim": 0}, "head_dim")],
)
def test_a_format_that_cannot_be_is_refused(change, message):
    fields = {
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "block_tokens": 16,
        "dtype": "bfloat16",
        "layers_per_group": 2,
    }
    with pytest.raises(ValueError, match=message):
        BlockFormat(**{**fields, **change})


def test_only_full_blocks_have_keys():
    assert [len(chain_keys(ROOT, range(n), 16)) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2, 2]


def test_a_longer_prompt_keeps_the_keys_of_its_prefix():
    tokens = np.random.default_rng(0).integers(0, 2**31, 400)
    assert chain_keys(ROOT, tokens, 16)[:12] == chain_keys(ROOT, tokens[:200], 16)


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32),
    st.integers(0, 31),
    st.integers(1, 2**32 - 1),
)
def test_any_changed_token_changes_its_key_and_all_later_ones(tokens, index, delta):
    changed = list(tokens)
    changed[index] = (changed[index] + delta) % 2**32
    before, after = chain_keys(ROOT, tokens, 16), chain_keys(ROOT, changed, 16)
    first = index // 16
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after[first:])


@pytest.mark.parametrize(
    "other",
    [
        [t + 31 if i == 3 else t - 1 if i == 4 else t for i, t in enumerate(range(100, 116))],
        [101, 100, *range(102, 116)],
        [t + (1 << 16) for t in range(100, 116)],
        [*range(100, 115), 0],
    ],
)
def test_blocks_that_weak_hashes_confuse_have_other_keys(other):
    assert chain_keys(ROOT, list(range(100, 116)), 16) != chain_keys(ROOT, other, 16)


def test_a_million_random_blocks_have_no_two_equal_keys():
    ids = np.random.default_rng(1).integers(0, 49_152, (1_000_000, 4))
    unique = len(np.unique(ids, axis=0))
    keys = {chain_keys(ROOT, row, 4)[0] for row in ids}
    assert len(keys) == unique


def test_salt_and_fingerprint_are_tagged_apart():
    assert (
        len({root_key(b"w"), root_key(b"w", "x"), root_key(b"w", "y"), root_key(b"x", "w"), root_key(b"wx")})
        == 5
    )
    assert tagged_digest(a="xb", b="") != tagged_digest(a="x", b="b")
    assert tagged_digest(a="1") != tagged_digest(a=1)
    assert tagged_digest(a=b"1") != tagged_digest(a="1")


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_keys_are_the_same_in_every_process(hash_seed):
    code = (
        "from kvstore.block import chain_keys, root_key\n"
        "print(chain_keys(root_key(b'weights', 'a'), range(64), 16)[-1].hex())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == chain_keys(root_key(b"weights", "a"), range(64), 16)[-1].hex()


def test_negative_or_huge_token_ids_are_refused_not_wrapped():
    for bad in ([-1] * 16, [2**32] * 16):
        with pytest.raises(OverflowError):
            chain_keys(ROOT, bad, 16)

"""Prompts of a replay share exactly what the trace shares, on every scale."""

import pytest

from kvstore.errors import InvalidError
from launch.replaying.prompts import Scale, lines, prompt
from mooncake_jax.trace import Trace, TraceRequest

TURNS = [
    TraceRequest(2000, 1000, 40, [7, 8]),
    TraceRequest(3000, 1600, 1, [7, 8, 9, 10]),
    TraceRequest(3500, 600, 1000, [7, 1_000_000]),
]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("block_tokens", [512, 16, 4])
def test_prefixes_are_shared_to_the_block(block_tokens):
    scale = Scale(block_tokens=block_tokens)
    first, second, third = (prompt(turn, scale) for turn in TURNS)
    assert [len(first), len(second), len(third)] == [
        -(-turn.input_length * block_tokens // 512) for turn in TURNS
    ]
    assert common(first, second) == len(first)  # the first one's partial block is the beginning of block 8
    assert common(first, third) == block_tokens
    assert all(0 <= token < 250 for token in [*first, *second, *third])


def test_lines_come_at_their_times_and_long_ones_are_counted():
    scale = Scale(block_tokens=16, speed=2.0, max_tokens=52, output_share=0.5)
    sent, num_too_long = lines(Trace("t", TURNS), scale)
    assert num_too_long == 0
    assert [(line.index, line.at_seconds, len(line.tokens), line.max_tokens) for line in sent] == [
        (0, 0.0, 32, 1),
        (1, 0.5, 50, 1),
        (2, 0.75, 19, 16),
    ]
    sent, num_too_long = lines(Trace("t", TURNS), Scale(block_tokens=16, max_tokens=50))
    assert ([line.index for line in sent], num_too_long) == ([0], 2)


def test_impossible_scales_are_refused():
    for changes in ({"block_tokens": 0}, {"speed": 0.0}, {"vocab_size": 1}, {"output_share": -1.0}):
        with pytest.raises(InvalidError, match="scale"):
            Scale(**changes)

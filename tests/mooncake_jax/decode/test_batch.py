"""Rows of the decode batch: lowest slot first, steps, positions, ends, filled blocks."""

import numpy as np
import pytest

from mooncake_jax.decode.batch import Batch, finish_of
from mooncake_jax.engine.contract import DrawnTokens
from mooncake_jax.request import Request, Sampling

Z = 4


def request(length: int, max_tokens: int, **fields) -> Request:
    return Request(f"r{length}-{max_tokens}", list(range(length)), max_tokens, **fields)


def step(batch: Batch, tokens: dict[int, int]):
    drawn, logprobs = np.full(batch.num_slots, -1, np.int32), np.full(batch.num_slots, np.nan, np.float32)
    for slot, token in tokens.items():
        drawn[slot], logprobs[slot] = token, -token
    return batch.advance(DrawnTokens(drawn, logprobs))


def test_the_lowest_free_slot_is_taken():
    batch = Batch(3, 100, Z)
    assert [batch.take_slot() for _ in range(4)] == [0, 1, 2, None]
    batch.leave(2)
    batch.leave(0)
    assert batch.take_slot() == 0
    assert batch.num_taken == 2
    with pytest.raises(ValueError, match="slot 2 is free already"):
        batch.leave(2)


def test_a_row_feeds_each_drawn_token_at_the_next_position():
    batch = Batch(2, 100, Z)
    batch.take_slot()
    slot = batch.take_slot()
    assert not batch.rows().active.any(), "a slot that is still being filled must not run"
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=42)
    batch.join(slot, request(5, 4, sampling=sampling), first_token=77)
    seen = []
    for token in (10, 11):
        rows = batch.rows()
        assert rows.active.tolist() == [False, True]
        seen.append((int(rows.tokens[1]), int(rows.positions[1]), int(rows.draw.step[1])))
        (drawn,) = step(batch, {1: token})
        assert (drawn.slot, drawn.token, drawn.logprob, drawn.finish) == (1, token, -token, None)
    assert seen == [(77, 5, 1), (10, 6, 2)]
    draw = batch.rows().draw
    assert (draw.temperature[1], draw.top_k[1], draw.top_p[1], draw.seed[1]) == (0.5, 3, np.float32(0.9), 42)
    (drawn,) = step(batch, {1: 12})
    assert (drawn.finish, drawn.full_block) == ("length", 1)  # position 7 was fed: block 1 is whole
    assert not batch.rows().active.any()
    assert batch.take_slot() == 1


def test_top_p_of_a_row_that_never_was_is_valid():
    assert (Batch(2, 100, Z).rows().draw.top_p == 1.0).all()


def test_rows_do_not_touch_each_other():
    batch = Batch(3, 100, Z)
    for slot, length in enumerate((3, 6, 9)):
        assert batch.take_slot() == slot
        batch.join(slot, request(length, 5, stop_token_ids=[9]), first_token=slot)
    drawn = step(batch, {0: 4, 1: 9, 2: 5})
    assert [(one.slot, one.finish, one.full_block) for one in drawn] == [
        (0, None, 0),
        (1, "stop", None),
        (2, None, None),
    ]
    assert batch.rows().active.nonzero()[0].tolist() == [0, 2]
    assert batch.num_cached_tokens == 4 + 10
    assert batch.rows().tokens[[0, 2]].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("token", "num_drawn", "position", "expected"),
    [
        (5, 1, 10, None),
        (7, 1, 10, "stop"),
        (5, 4, 13, "length"),
        (7, 4, 13, "stop"),  # the last allowed one is a stop token
        (5, 2, 99, "length"),  # position 99 of 100 is the last one
        (5, 2, 98, None),
    ],
)
def test_ends(token, num_drawn, position, expected):
    assert (
        finish_of(token, num_drawn, position, request(10, 4, stop_token_ids=[7]), max_tokens=100) == expected
    )

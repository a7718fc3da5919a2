import msgspec
import numpy as np
import pytest

from mooncake_jax.engine.contract import PromptScores
from mooncake_jax.engine.prompt_logprobs import prompt_logprobs
from mooncake_jax.request import FirstToken, PromptLogprobs

RNG = np.random.default_rng(0)


def tile(num_tokens):
    logprobs, best = RNG.normal(size=num_tokens), RNG.normal(size=(num_tokens, 20))
    return PromptScores(
        logprobs.astype(np.float32), RNG.integers(0, 2**31 - 1, (num_tokens, 20)), best.astype(np.float32)
    )


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_tiles_are_joined_and_arrive_as_they_were(num_top):
    tiles = [tile(3), tile(1)]
    told = FirstToken(1, -0.5, 0, 0, prompt=prompt_logprobs(tiles, num_top))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=FirstToken).prompt
    logprobs, tops = arrived.unpacked()
    assert logprobs == [p for one in tiles for p in one.logprobs.tolist()]
    assert tops == [
        [(int(i), float(p)) for i, p in zip(ids[:num_top], row[:num_top], strict=True)]
        for one in tiles
        for ids, row in zip(one.top_tokens, one.top_logprobs, strict=True)
    ]


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_prompt_of_one_token_has_none(num_top):
    assert prompt_logprobs([], num_top).unpacked() == ([], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": b"12345"},
        {"top_tokens": b""},
        {"top_logprobs": b"1234"},
        {"num_top": 2},
        {"num_top": 21},
        {"num_top": -1},
    ],
    ids=str,
)
def test_bytes_that_do_not_fit_together_are_refused_on_arrival(fields):
    good = {"num_top": 1, "logprobs": b"12345678", "top_tokens": b"12345678", "top_logprobs": b"12345678"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=PromptLogprobs).num_top == 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(good | fields), type=PromptLogprobs)

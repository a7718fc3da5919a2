"""Donated caches: a step writes into the memory it was given, and one that fails takes no more with it than its requests.

Reported in public as jax-ml/jax#15368, #9675 and sgl-project/sglang-jax#230: a donation that is lost copies the KV
in every step; an error within a step leaves deleted buffers behind, and all later requests fail. (That JAX warns of
a donation it cannot use is an error in all tests, by `filterwarnings`.)
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from cases.judge import MAX_TOKENS, refused, text
from cases.served import COMPLETIONS, JSON

from models import draw as draws
from mooncake_jax.engine.contract import BatchRows
from mooncake_jax.request import Sampling


def places(cache) -> list[int]:
    return [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(cache)]


def test_steps_write_into_the_cache_that_they_were_given(engines):
    prefill, decode = engines[0][0], engines[1][0]
    form, slots = decode.format, decode.num_slots
    before, given = places(prefill._cache), jax.tree.leaves(prefill._cache)
    list(prefill.prefill(0, np.arange(20), 0, sample=Sampling()))
    assert places(prefill._cache) == before
    assert all(pages.is_deleted() for pages in given)

    before, given = places(decode._cache), jax.tree.leaves(decode._cache)
    decode.insert(0, 0, np.zeros((2, *form.shape), form.item_dtype))
    decode.generate(
        BatchRows(
            np.arange(slots) == 0,
            np.zeros(slots, np.int32),
            np.full(slots, 20, np.int32),
            draws.blank(slots),
        )
    )
    assert places(decode._cache) == before
    assert all(pages.is_deleted() for pages in given)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_that_raises_fails_its_request_and_no_later_one(serve, engines, monkeypatch, role):
    def lose(*args):
        for pages in args[2]:
            pages.delete()  # as a failed donated call leaves it
        raise RuntimeError("device lost")

    prefill, decode = engines[0][0], engines[1][0]
    owner = prefill._steps if role == "prefill" else decode
    served, prompt = serve(), text(40, seed=57)
    for stream in (False, True):
        with monkeypatch.context() as patch:
            group = dict.fromkeys(owner._programs.group, lose)
            patch.setattr(owner, "_programs", owner._programs._replace(group=group))
            if role == "decode" and stream:  # the first token may be out already
                fields = {"model": "fake", "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True}
                status, raw = served.frontend.request("POST", COMPLETIONS, json.dumps(fields).encode(), JSON)
                assert status in (200, 500)
                assert b"device lost" in raw
                assert b"[DONE]" not in raw
            else:
                message = refused(served.frontend.ask(prompt, MAX_TOKENS, stream=stream), 500)
                assert "device lost" in message
        served.cluster.check_idle()
        served.judge.right_reply(prompt, served.frontend.ask(prompt, MAX_TOKENS, logprobs=0))

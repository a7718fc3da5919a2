"""Two prefill and two decode instances with fake engines answer as the oracle does, whatever is reused, moved or broken."""

from __future__ import annotations

import pytest
from e2e.cluster import FakeCluster
from fakes.engine import FORMAT, answer, logprob_of

Z = FORMAT.block_tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(31 * i + 7 * seed + i * i) % 200 for i in range(length)]


@pytest.fixture(params=["shm", "tcp"])
def cluster(request):
    host_ids = (lambda name: "one") if request.param == "shm" else (lambda name: name)
    with FakeCluster(host_ids=host_ids) as cluster:
        yield cluster


def test_answers_are_the_oracles_at_every_length(cluster):
    for length in (1, 2, Z - 1, Z, Z + 1, 2 * Z, 2 * Z + 1, 8 * Z - 1, 8 * Z, 8 * Z + 1, 100):
        tokens = prompt(length, seed=length)
        got = cluster.ask(tokens)
        assert got.tokens == answer(tokens, 6), length
        assert got.finish == "length"
        assert got.logprobs == [logprob_of(token) for token in got.tokens]
        assert got.first.cached_tokens == 0

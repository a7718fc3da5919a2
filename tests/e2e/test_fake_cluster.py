"""Two prefill and two decode instances with fake engines answer as the oracle does, whatever is reused or moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e.cluster import LocalCluster
from fakes.engine import FORMAT, answer, logprob_of
from msgspec.structs import replace

from kvstore.errors import InvalidError, StaleError
from mooncake_jax.messages import PREFILL
from mooncake_jax.request import PrefillRequest, Sampling

Z = FORMAT.block_tokens
LENGTHS = (1, 2, Z - 1, Z, Z + 1, 2 * Z - 1, 2 * Z, 2 * Z + 1, 8 * Z - 1, 8 * Z, 8 * Z + 1, 100)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(31 * i + 7 * seed + i * i) % 200 for i in range(length)]


@pytest.fixture(params=["shm", "tcp"])
def cluster(request):
    host_ids = (lambda name: "one") if request.param == "shm" else (lambda name: name)
    with LocalCluster(host_ids=host_ids) as cluster:
        cluster.path = request.param
        yield cluster


def test_answers_are_the_oracles_at_every_length(cluster):
    for length in LENGTHS:
        tokens = prompt(length, seed=length)
        got = cluster.ask(tokens)
        assert got.tokens == answer(tokens, 6), length
        assert got.finish == "length"
        assert got.logprobs == [logprob_of(token) for token in got.tokens]
        assert got.first.cached_tokens == 0
        assert got.done.streamed_nbytes == FORMAT.num_blocks(length) * FORMAT.nbytes
    decode = [cluster.counters(name) for name in ("decode-0", "decode-1")]
    assert sum(one["failed_transfers"] for one in decode) == 0
    assert sum(cluster.counters(f"prefill-{i}")[f"{cluster.path}_write"] for i in (0, 1)) > 0


def test_a_prompt_is_reused_at_home_and_from_another_node(cluster):
    for length in LENGTHS:
        tokens = prompt(length, seed=1000 + length)
        reusable = (length - 1) // Z
        first = cluster.ask(tokens)
        here = first.placement.prefill.name
        there = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[here]
        cluster.wait_held(here, tokens, range(length // Z))
        again = cluster.ask(tokens, avoid=[there])
        fetched = cluster.ask(tokens, avoid=[here])
        spread = cluster.ask(tokens, avoid=[here])
        assert first.tokens == again.tokens == fetched.tokens == spread.tokens == answer(tokens, 6), length
        reused = [
            (one.first.cached_tokens // Z, one.first.fetched_tokens // Z) for one in (again, fetched, spread)
        ]
        assert reused == [(reusable, 0), (reusable, reusable), (reusable, 0)], length
    for name in ("prefill-0", "prefill-1"):
        read = cluster.counters(name)
        assert (read["shm_read"] > 0, read["tcp_read"] > 0) == (cluster.path == "shm", cluster.path == "tcp")


def test_the_next_turn_reuses_the_answer(cluster):
    for length in (1, Z - 1, Z, Z + 1, 3 * Z + 2):
        tokens = prompt(length, seed=2000 + length)
        num_drawn = 3 * Z
        first = cluster.ask(tokens, num_drawn)
        assert first.tokens == answer(tokens, num_drawn)
        written = (length + num_drawn - 1) // Z  # the last token drawn was never an input
        if length // Z:
            cluster.wait_held(first.placement.prefill.name, tokens, range(length // Z))
        cluster.wait_held(first.placement.decode.name, tokens + first.tokens, range(length // Z, written))
        other = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[first.placement.prefill.name]
        turn = [*tokens, *first.tokens, 9, 8, 7]
        second = cluster.ask(turn, avoid=[other])
        assert second.tokens == answer(turn, 6), length
        assert (second.first.cached_tokens, second.first.fetched_tokens) == (
            written * Z,
            (written - length // Z) * Z,
        )


def test_seeds_reach_every_step(cluster):
    tokens = prompt(21)
    for seed in (0, 42):
        sampling = Sampling(temperature=0.8, seed=seed)
        assert cluster.ask(tokens, 9, sampling=sampling).tokens == answer(tokens, 9, sampling=sampling)


def test_stop_tokens_end_the_answer_wherever_they_are_drawn(cluster):
    tokens = prompt(3 * Z)
    drawn = answer(tokens, 8)
    assert len(set(drawn)) == 8, "choose another prompt: each token must stop once"
    for index, stop in enumerate(drawn):
        got = cluster.ask(tokens, 8, stop_token_ids=[250, stop])
        assert got.tokens == drawn[: index + 1]
        assert got.finish == "stop"
    last = cluster.ask(tokens, 1)
    assert (last.tokens, last.finish) == (drawn[:1], "length")


def test_salts_share_nothing():
    with LocalCluster(num_prefill=1, num_decode=1) as cluster:
        tokens = prompt(5 * Z)
        cached = []
        for salt in ("a", "b", "", "a"):
            got = cluster.ask(tokens, salt=salt)
            assert got.tokens == answer(tokens, 6)
            cached.append(got.first.cached_tokens)
            cluster.wait_held("prefill-0", tokens, range(5), salt)
        assert cached == [0, 0, 0, 4 * Z]


def test_many_at_once_with_common_prefixes(cluster):
    def ask(i: int) -> None:
        tokens = [*prompt(8 * Z, seed=i % 3), *prompt(1 + i % 11, seed=i)]
        assert cluster.ask(tokens, 1 + i % 9).tokens == answer(tokens, 1 + i % 9)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))


def test_a_small_home_node_means_recompute_not_failure():
    with LocalCluster(num_prefill=2, num_decode=1, num_home_blocks=4) as cluster:
        for i in range(6):
            tokens = prompt(9 * Z + i, seed=i)
            assert cluster.ask(tokens, 9).tokens == answer(tokens, 9)
        assert any(cluster.counters(f"prefill-{i}")["home_evicted"] for i in (0, 1))


def test_a_small_home_node_under_load():
    with LocalCluster(num_prefill=2, num_decode=2, num_home_blocks=5) as cluster:

        def ask(i: int) -> None:
            tokens = prompt(4 * Z + i % 7, seed=i % 3)
            assert cluster.ask(tokens, 5).tokens == answer(tokens, 5)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(40)))


def test_without_staging_the_store_is_filled():
    with LocalCluster(num_prefill=1, num_decode=1) as cluster:
        tokens = prompt(6 * Z + 1)
        call = cluster.call(tokens)
        first, done = call.prefill(call.place(), None)
        call.end(ok=True)
        assert (first.token, done.streamed_nbytes) == (answer(tokens, 1)[0], 0)
        assert cluster.instances["prefill-0"].home.stats()["committed"] == 6
        assert cluster.ask(tokens).first.cached_tokens == 6 * Z


def test_what_does_not_fit_together_is_refused():
    with LocalCluster(num_prefill=1, num_decode=1) as cluster:
        tokens = prompt(5 * Z)
        call = cluster.call(tokens)
        placement = call.place()
        stub = cluster.stub(placement.prefill.address, PREFILL)

        def prefill(placement, request=call.request, staging=None):
            return list(stub.prefill(PrefillRequest(request, placement, staging)))

        reborn = replace(placement.prefill, epoch=placement.prefill.epoch + 1)
        with pytest.raises(StaleError, match="new placement"):
            prefill(replace(placement, prefill=reborn))
        with pytest.raises(InvalidError, match="block keys"):
            prefill(replace(placement, keys=placement.keys[:-1]))
        with pytest.raises(InvalidError, match="block keys"):
            prefill(replace(placement, keys=[bytes(16), *placement.keys[1:]]))
        with pytest.raises(InvalidError, match="used for"):
            prefill(replace(placement, request_id="another"))
        long = replace(call.request, max_tokens=256)
        with pytest.raises(
            InvalidError, match="prompt of 20 tokens and an answer of up to 256 exceed the 256"
        ):
            prefill(placement, long)
        shorter = cluster.call(prompt(Z))
        shorter.request = replace(shorter.request, request_id=call.request.request_id)
        small = shorter.reserve(placement)
        with pytest.raises(InvalidError, match="staging of 1 blocks for a prompt of 5"):
            prefill(placement, staging=small)
        with pytest.raises(InvalidError, match="the handle is for 1 blocks, a prompt of 20 tokens has 5"):
            call.generate(placement, small, 1)
        call.end(ok=False)

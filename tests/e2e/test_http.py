"""Through HTTP, over the whole system with fake engines: right answers, and nothing left of who leaves."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e.cluster import LocalCluster
from e2e.http_frontend import cancel_many, http_frontend, prompt
from fakes.engine import FORMAT, answer

Z = FORMAT.block_tokens


@pytest.fixture
def cluster():
    with LocalCluster() as cluster:
        yield cluster


def test_answers_and_reuse(cluster):
    prompts = [prompt(length, seed) for seed, length in enumerate((1, Z, Z + 1, 3 * Z, 40, 41, 97, 98))]
    with http_frontend(cluster) as frontend, ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            replies = list(pool.map(frontend.ask, prompts))
            for tokens, (status, body) in zip(prompts, replies, strict=True):
                assert status == 200, body
                assert body["choices"][0]["token_ids"] == answer(tokens, 6)
        cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for _, body in replies]
        assert sum(cached) > 0


def test_one_token_and_a_stop_string(cluster):
    tokens = prompt(30)
    expected = answer(tokens, 6)
    with http_frontend(cluster) as frontend:
        body = frontend.ask(tokens, 1)[1]
        assert (body["choices"][0]["token_ids"], body["choices"][0]["finish_reason"]) == (
            expected[:1],
            "length",
        )
        text = frontend.ask(tokens)[1]["choices"][0]["text"]
        stopped = frontend.ask(tokens, stop=text[2])[1]["choices"][0]
        assert stopped["text"] == text[: text.index(text[2])]
        assert stopped["finish_reason"] == "stop"


def test_what_can_never_fit_is_400(cluster):
    with http_frontend(cluster) as frontend:
        status, body = frontend.ask(prompt(100_000))
    assert status == 400
    assert "100000" in body["error"]["message"]


def test_clients_that_leave_at_random_moments(cluster):
    cancel_many(cluster, 60, seed=1)

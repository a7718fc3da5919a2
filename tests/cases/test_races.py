"""Clients that cancel while KV moves leak nothing, and nobody's pages are used again too early.

Reported in public as vllm-project/vllm#46283, ai-dynamo/dynamo#7489, vllm-project/vllm-ascend#16662 and
sgl-project/sglang#8352: neither side frees its pages, and after some hundreds prefill admits nobody, while
its health is green.
"""

from __future__ import annotations

import random
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases.judge import Judge, text
from e2e.cluster import LocalCluster
from e2e.http_frontend import http_frontend
from e2e.real import CFG, local_cluster

from launch.model_source import byte_tokenizer
from mooncake_jax.decode.config import DecodeConfig

CONCURRENCY = 8
DECODE = DecodeConfig(staging_nbytes=256 << 20, max_waiting=16, quarantine_seconds=0.5)


def cancel_many(cluster: LocalCluster, judge: Judge, num_requests: int, seed: int) -> None:
    """Each client leaves within twice the time that a first token takes; then 20 stay for their answers."""
    chance = random.Random(seed)
    with (
        http_frontend(cluster, byte_tokenizer(), CFG.vocab_size) as frontend,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):

        def prompt(i: int) -> list[int]:
            shared = chance.choice((0, 0, 100, 300))
            return [*text(shared, seed), *text(chance.randrange(1, 600), seed=1000 * seed + i)]

        replies = list(pool.map(lambda i: frontend.ask(prompt(i)), range(-CONCURRENCY, 0)))
        ttft = statistics.median(body["mooncake"]["ttft_seconds"] for _, body in replies)

        def leave(i: int) -> bool:
            return frontend.leave(prompt(i), 2 * ttft * chance.random(), 200, stream=chance.random() < 0.5)

        ended = list(pool.map(leave, range(num_requests)))
        assert False in ended, "nobody left before the end"
        cluster.check_idle()
        prompts = [prompt(num_requests + i) for i in range(20)]
        for tokens, reply in zip(
            prompts, pool.map(lambda p: frontend.ask(p, logprobs=0), prompts), strict=True
        ):
            judge.right_reply(tokens, reply)
        assert frontend.request("GET", "/health")[0] == 200
        assert frontend.request("GET", "/ready")[0] == 200
    judge.canary(cluster)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_sixty_clients_that_leave_at_random_moments(transport, engines, oracle):
    with local_cluster(engines, 1, transport, DECODE) as cluster:
        cancel_many(cluster, Judge(oracle), 60, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_five_hundred_clients_that_leave_at_random_moments(transport, engines, oracle):
    with local_cluster(engines, 2, transport, DECODE) as cluster:
        cancel_many(cluster, Judge(oracle), 500, seed=2)

"""Nothing compiles after ready, whatever the sizes.

Reported in public as vllm-project/vllm#16726 and #14510, vllm-project/tpu-inference#58 and #898, and
sgl-project/sglang-jax#117: a size that is no bucket (odd limits, a batch of 3, the last ragged chunk) compiles
while requests wait.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from cases.judge import Judge, text
from e2e.real import arguments, local_cluster

from mooncake_jax.engine.compiles import process_compiles
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine
from mooncake_jax.request import Bias, Sampling

LIMIT = 317  # prompt and answer: no multiple of a block, a tile or a power of two
NUM_REQUESTS = 300
MAX_BURST = 6
LONGEST_ANSWER = 9


def sampling(chance: random.Random) -> Sampling:
    if chance.random() < 0.4:
        return Sampling()
    return Sampling(
        temperature=chance.choice((0.0, chance.uniform(0.1, 2.0))),
        top_k=chance.choice((0, 0, 1, 7, 100)),
        top_p=chance.choice((1.0, 0.9, 0.01)),
        min_p=chance.choice((0.0, 0.0, 0.1)),
        presence_penalty=chance.choice((0.0, 0.0, 1.0)),
        repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
        biases=chance.choice(([], [Bias(3, 2.0)], [Bias(7, -1e30, 2), Bias(9, 1.0)])),
        num_top=chance.choice((0, 0, 5)),
        seed=chance.randrange(2**32),
    )


def test_three_hundred_requests_of_any_size_compile_nothing(compile_cache, oracle):
    size = {"max_tokens": LIMIT}
    engines = [JaxPrefillEngine(**arguments(2) | size)], [JaxDecodeEngine(**arguments(3) | size)]
    chance = random.Random(55)
    jobs = []
    for i in range(NUM_REQUESTS):
        length = (1, LIMIT - 1)[i] if i < 2 else chance.randrange(1, LIMIT)
        max_tokens = chance.randint(1, min(LIMIT - length, LONGEST_ANSWER))
        jobs.append((text(length, seed=chance.randrange(40)), max_tokens, sampling(chance)))
    with local_cluster(engines, 1, "shm") as cluster, ThreadPoolExecutor(MAX_BURST) as pool:
        judge = Judge(oracle)
        compiled = process_compiles().total
        answers, waiting = [], list(jobs)
        while waiting:
            burst = [waiting.pop() for _ in range(min(chance.randint(1, MAX_BURST), len(waiting)))]
            asked = [pool.submit(cluster.ask, tokens, n, sampling=how) for tokens, n, how in burst]
            answers += [(*job, one.result()) for job, one in zip(burst, asked, strict=True)]
        assert process_compiles().total == compiled
        judge.canary(cluster)
    assert len(answers) == NUM_REQUESTS
    assert len({len(tokens) for tokens, *_ in answers}) > LIMIT / 2
    assert sum(answer.first.cached_tokens > 0 for *_, answer in answers) > NUM_REQUESTS // 4
    for tokens, max_tokens, how, answer in answers[::10]:
        greedy = how.temperature == 0 and not how.looks_back and not how.biases
        assert len(answer.tokens) == max_tokens
        assert judge.violation(tokens, answer.tokens, answer.logprobs, greedy=greedy) is None

"""The served answer equals the oracle's, whatever was reused, from wherever, beside whomever.

A small random model in float32, whose logits move when one early token changes: `test_llama` proves that.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from e2e.real import CFG, Z, arguments, local_cluster

from mooncake_jax.engine.compiles import process_compiles
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine
from mooncake_jax.equality import TOLERANCES, compare

MAX_TOKENS = 6
LENGTHS = (
    1,
    2,
    Z - 1,
    Z,
    Z + 1,
    2 * Z - 1,
    2 * Z,
    2 * Z + 1,
    8 * Z - 1,
    8 * Z,
    8 * Z + 1,
    255,
    256,
    257,
    300,
    511,
    513,
)
LONG_LENGTHS = (1000, 2049, 4000)


@cache
def prompts() -> list[list[int]]:
    """40 prompts: half are cut from one text, so that they share prefixes; half have nothing in common."""
    rng = np.random.default_rng(7)
    text = rng.integers(0, CFG.vocab_size, CFG.max_position).tolist()
    shared = [text[:n] for n in (*LENGTHS, *LONG_LENGTHS)]
    own = [rng.integers(0, CFG.vocab_size, n).tolist() for n in (*LENGTHS, *LONG_LENGTHS)]
    return shared + own


def worst(answer, prompt, oracle, dtype="float32"):
    return compare(answer.tokens, answer.logprobs, oracle.score(prompt, answer.tokens), dtype)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("num", [1, 2], ids=["1P1D", "2P2D"])
def test_forty_prompts_twice_eight_at_a_time(num, transport, engines, oracle, capsys):
    jobs = [prompt for prompt in prompts() for _ in range(2)]
    random.Random(num).shuffle(jobs)
    with local_cluster(engines, num, transport) as cluster, ThreadPoolExecutor(8) as pool:
        compiles = process_compiles().total
        answers = list(pool.map(lambda prompt: cluster.ask(prompt, MAX_TOKENS), jobs))
        cluster.check_idle()
        moved = {
            path: sum(cluster.counters(name).get(path, 0) for name in cluster.instances)
            for path in ("shm_write", "tcp_write")
        }
        compiles = process_compiles().total - compiles
    reports = [worst(answer, prompt, oracle) for answer, prompt in zip(answers, jobs, strict=True)]
    flips = sum(report.num_allowed_flips for report in reports)
    with capsys.disabled():
        largest = max(report.max_abs_dlogprob for report in reports)
        print(
            f"\n{num}P{num}D over {transport}: max |Δlogprob| {largest:.1e}, {flips} allowed flips", end=" "
        )
    assert [r.first_violation for r in reports if not r.equal] == []
    assert compiles == 0
    assert all(len(answer.tokens) == MAX_TOKENS for answer in answers)
    reused = [answer for answer, prompt in zip(answers, jobs, strict=True) if answer.first.cached_tokens]
    assert len(reused) >= 20
    assert (moved["tcp_write"] > 0) == (transport == "tcp")
    assert (moved["shm_write"] > 0) == (transport == "shm")


def test_two_layers_swapped_is_far_outside_the_rule(oracle):
    prompt = prompts()[10]
    swapped = (
        [JaxPrefillEngine(**arguments(2, swapped=True))],
        [JaxDecodeEngine(**arguments(4, swapped=True))],
    )
    with local_cluster(swapped, 1, "shm") as cluster:
        report = worst(cluster.ask(prompt, MAX_TOKENS), prompt, oracle)
    assert not report.equal
    assert report.max_abs_dlogprob > 10 * max(TOLERANCES["float32"].logprob, TOLERANCES["bfloat16"].logprob)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prefix_fetched_from_the_other_prefill_node(transport, engines, oracle):
    prompt = prompts()[-2]
    with local_cluster(engines, 2, transport) as cluster:
        cold = cluster.ask(prompt, MAX_TOKENS)
        cluster.wait_held(cold.placement.prefill.name, prompt, range(len(prompt) // Z))
        other = cluster.ask(prompt, MAX_TOKENS, avoid=[cold.placement.prefill.name])
        cluster.check_idle()
    assert cold.first.cached_tokens == 0
    assert other.placement.prefill.name != cold.placement.prefill.name
    assert other.first.fetched_tokens == other.first.cached_tokens == (len(prompt) - 1) // Z * Z
    for answer in (cold, other):
        assert worst(answer, prompt, oracle).first_violation is None


def test_the_next_turn_reuses_the_answer(engines, oracle):
    prompt = prompts()[5]
    with local_cluster(engines, 1, "shm") as cluster:
        first = cluster.ask(prompt, 3 * Z)
        decode = first.placement.decode.name
        text = [*prompt, *first.tokens]
        answered = range(len(prompt) // Z, (len(text) - 1) // Z)
        cluster.wait_held(decode, text, answered)
        follow_up = [*text, 1, 2, 3]
        second = cluster.ask(follow_up, MAX_TOKENS)
        cluster.check_idle()
    assert second.first.cached_tokens >= answered.stop * Z > len(prompt)
    assert worst(second, follow_up, oracle).first_violation is None

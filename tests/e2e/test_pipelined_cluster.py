"""A prefill instance with a pipeline of stages in a whole cluster: right answers, and no drain between requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e.cluster import LocalCluster, wait_until
from fakes.engine import answer
from fakes.stages import FakeStages, fake_plan

from models import ticks
from mooncake_jax.engine.pipeline_prefill import PipelinePrefillEngine

Z = 4


def text(length, seed):
    return [(seed * 31 + i * 7) % 250 for i in range(length)]


class Held:
    """Ticks run while it is open."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()

    def __call__(self):
        assert self.open.wait(60)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_queued_prompts_long_and_short_keep_the_pipeline_full(num_stages):
    held = Held()
    stages = FakeStages(fake_plan(num_stages, num_slots=8), before_tick=held)
    prompts = [text(90, 1), *(text(3 + i, i) for i in range(2, 8))]
    with (
        LocalCluster(
            num_prefill=1, num_decode=1, prefill_engine=lambda: PipelinePrefillEngine(stages)
        ) as cluster,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        held.open.clear()
        del stages.ticks[:]
        answers = [pool.submit(cluster.ask, prompt) for prompt in prompts]
        wait_until(lambda: cluster.books("prefill-0")["queued_requests"] == len(prompts), "all are queued")
        held.open.set()
        for prompt, got in zip(prompts, answers, strict=True):
            assert got.result().tokens == answer(prompt, 6)
    chunks = sum(-(-len(prompt) // Z) for prompt in prompts)
    counted = ticks.occupancy(stages.ticks)
    assert counted.busy == num_stages * chunks
    assert len(stages.ticks) == chunks + num_stages - 1, "the pipeline drained in between"


def test_a_reused_prefix_and_a_cancelled_request_beside_others():
    stages = FakeStages(fake_plan(2))
    with LocalCluster(
        num_prefill=1, num_decode=1, prefill_engine=lambda: PipelinePrefillEngine(stages)
    ) as cluster:
        prompt = text(10 * Z, 5)
        cluster.ask(prompt)
        cluster.wait_held("prefill-0", prompt, range(10))
        again = cluster.ask([*prompt, 1, 2, 3])
        assert again.first.cached_tokens == 10 * Z
        assert again.tokens == answer([*prompt, 1, 2, 3], 6)
        call = cluster.call(text(200, 9))
        call.cancel()
        with pytest.raises(Exception, match=r"(?i)cancel"):
            call.run()
        assert cluster.ask(text(30, 2)).tokens == answer(text(30, 2), 6)


def test_a_step_that_fails_starts_all_but_one_again():
    failures = [None] * 5 + [RuntimeError("the device is gone")]

    def fail():
        error = failures.pop(0) if failures and len(stages.ticks) > warm else None
        if error is not None:
            raise error

    warm = 1 << 30
    stages = FakeStages(fake_plan(2), before_tick=fail)
    with (
        LocalCluster(
            num_prefill=1, num_decode=1, prefill_engine=lambda: PipelinePrefillEngine(stages)
        ) as cluster,
        ThreadPoolExecutor(3) as pool,
    ):
        warm = len(stages.ticks)
        prompts = [text(60, i) for i in range(3)]
        outcomes = [pool.submit(cluster.ask, prompt) for prompt in prompts]
        failed = 0
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if outcome.exception() is None:
                assert outcome.result().tokens == answer(prompt, 6)
            else:
                failed += 1
                assert "the device is gone" in str(outcome.exception())
        assert failed == 1

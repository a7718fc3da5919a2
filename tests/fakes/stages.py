"""Stages with the arithmetic of `fakes.engine`: what a pipeline over them serves, `fakes.engine.answer` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from fakes.engine import FINGERPRINT, FORMAT, VOCAB_SIZE, FakeCache, logprob_of, top_of_fake

from models.ticks import Tick
from mooncake_jax.engine.contract import Sampled
from mooncake_jax.engine.stages import PipelinePlan
from mooncake_jax.request import Sampling

MAX_TOKENS = 256


def fake_plan(num_stages: int = 2, *, chunk_tokens: int = 4, num_slots: int = 4) -> PipelinePlan:
    return PipelinePlan(FORMAT, FINGERPRINT, VOCAB_SIZE, MAX_TOKENS, num_slots, num_stages, chunk_tokens)


def fake_cache(plan: PipelinePlan) -> FakeCache:
    """Of all stages."""
    return FakeCache(plan.format, plan.num_slots, plan.max_tokens + plan.chunk_tokens)


class _Ran:
    def __init__(self, blocks: dict[int, np.ndarray], sampled: Sampled | None):
        self._blocks, self._sampled = blocks, sampled

    def blocks(self, stage: int) -> np.ndarray:
        return self._blocks[stage]

    def sampled(self) -> Sampled:
        assert self._sampled is not None
        return self._sampled


class FakeStages:
    """`mooncake_jax.engine.stages.Stages`.

    Members of a group share one `cache`, in which each computes its `own_stages`, and `meet` at every tick, as devices
    do in a collective. `before_tick()` runs before each one: tests block or raise in it.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        cache: FakeCache | None = None,
        *,
        own_stages: Sequence[int] | None = None,
        meet: Callable[[], object] = lambda: None,
        before_tick: Callable[[], None] = lambda: None,
    ):
        self.plan, self.before_tick = plan, before_tick
        self.own_stages = list(range(plan.num_stages) if own_stages is None else own_stages)
        self.compiles = 0
        self.is_ready = False
        self.ticks: list[Tick] = []
        self._cache, self._meet = cache or fake_cache(plan), meet
        self._tokens: list[list[int]] = [[]] * plan.num_stages

    def start(self) -> None:
        self.is_ready = True

    def reset(self) -> None:
        self._cache.lose()
        self._tokens = [[]] * self.plan.num_stages

    def tick(
        self, tick: Tick, tokens: np.ndarray, sample: Sampling | None, prompt: Sequence[int] | np.ndarray
    ) -> _Ran:
        self.before_tick()
        self.ticks.append(tick)
        self._tokens = [tokens.tolist(), *self._tokens[:-1]]
        blocks: dict[int, np.ndarray] = {}
        for stage in self.own_stages:
            chunk = tick[stage]
            if chunk is not None:
                layers = self._layers(stage)
                self._cache.feed(chunk.slot, layers, self._tokens[stage], chunk.start)
                first, count = chunk.start // FORMAT.block_tokens, FORMAT.num_blocks(chunk.num_tokens)
                blocks[stage] = self._cache.blocks(chunk.slot, layers, first, count)
        sampled, last = None, tick[-1]
        if sample is not None and last is not None and self.plan.num_stages - 1 in self.own_stages:
            digests = self._cache.digests(last.slot, slice(None), last.stop)
            token = self._cache.next_token(digests, sample, step=0)
            sampled = Sampled(token, logprob_of(token), top_of_fake(token, sample.num_top))
        self._meet()
        return _Ran(blocks, sampled)

    def insert(self, stage: int, slot: int, first_page: int, blocks: np.ndarray) -> None:
        if stage in self.own_stages:
            self._cache.write(slot, self._layers(stage), first_page, blocks)

    def _layers(self, stage: int) -> slice:
        size = self.plan.groups_per_stage * FORMAT.layers_per_group
        return slice(stage * size, (stage + 1) * size)

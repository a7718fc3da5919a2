"""Stages on devices that this process computes on: all of a pipeline, or its share where several processes have joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from models import llama
from models import platform as platforms
from models.config import LlamaConfig
from models.platform import Platform
from models.sharding import STAGE, MeshShape
from models.ticks import Tick
from mooncake_jax.engine.compiles import buckets, process_compiles
from mooncake_jax.engine.contract import Sampled
from mooncake_jax.engine.draw_rows import one_row
from mooncake_jax.engine.drawing import Drawing
from mooncake_jax.engine.jax_prefill import block_format
from mooncake_jax.engine.pipeline_prefill import PipelinePrefillEngine
from mooncake_jax.engine.pipeline_steps import Given, PipelineSteps
from mooncake_jax.engine.stages import PipelinePlan
from mooncake_jax.request import Sampling


def make_plan(
    cfg: LlamaConfig,
    mesh: MeshShape,
    *,
    dtype: str,
    num_slots: int,
    max_tokens: int,
    fingerprint: bytes,
    chunk_tokens: int = 0,
    platform: Platform | None = None,
) -> PipelinePlan:
    """`chunk_tokens` 0: as many as the platform's largest tile. Raises ValueError with the reason for a mesh that the
    model does not fit."""
    mesh.check(cfg)
    if mesh.data > 1:
        raise ValueError(f"mesh {mesh}: one prefill engine has one pipeline; run {mesh.data} of them")
    if (cfg.num_layers // mesh.stage) % cfg.layers_per_group:
        raise ValueError(
            f"mesh {mesh}: {cfg.num_layers // mesh.stage} layers a stage are not whole layer groups of "
            f"{cfg.layers_per_group}"
        )
    if not 1 <= max_tokens <= cfg.max_position:
        raise ValueError(
            f"max_tokens {max_tokens}: the model has positions for 1 … {cfg.max_position} tokens"
        )
    if num_slots < 1 or chunk_tokens < 0:
        raise ValueError(f"num_slots {num_slots}, chunk_tokens {chunk_tokens}: must be positive")
    most = min(chunk_tokens or (platform or platforms.current()).tile_tokens, max_tokens)
    return PipelinePlan(
        format=block_format(cfg, dtype),
        fingerprint=fingerprint,
        vocab_size=cfg.vocab_size,
        max_tokens=max_tokens,
        num_slots=num_slots,
        num_stages=mesh.stage,
        chunk_tokens=-(-most // cfg.block_tokens) * cfg.block_tokens,
    )


def local_pipeline(
    cfg: LlamaConfig,
    params: llama.Params,
    *,
    mesh: MeshShape,
    devices: Sequence[Any] | None = None,
    platform: Platform | None = None,
    **sizes: Any,
) -> PipelinePrefillEngine:
    """A prefill engine over devices of this process (None: the first ones); `sizes` as `make_plan` takes them."""
    plan = make_plan(cfg, mesh, platform=platform, **sizes)
    return PipelinePrefillEngine(LocalStages(cfg, params, plan, mesh.make(devices), platform))


class _Ran:
    """`stages.Ran` of devices that are here. Drawing begins when it is asked for."""

    def __init__(self, stages: LocalStages, given: Given, sample: Sampling | None, prompt: Sequence[int]):
        self._stages, self._given, self._sample, self._prompt = stages, given, sample, prompt

    def blocks(self, stage: int) -> np.ndarray:
        return self._given.stage_blocks(stage).view(self._stages.plan.format.item_dtype)

    def sampled(self) -> Sampled:
        if self._sample is None:
            raise ValueError("a token is drawn where the tick was asked to")
        return self._stages.draw(self._given, self._sample, self._prompt)


class LocalStages:
    """`mooncake_jax.engine.stages.Stages`. `params` is a host pytree (see `models.llama.param_table`).

    `mesh` may have devices of other processes: all of them then make the same calls in the same order, and results are
    for the stages of this one.
    """

    def __init__(
        self,
        cfg: LlamaConfig,
        params: llama.Params,
        plan: PipelinePlan,
        mesh: Mesh,
        platform: Platform | None = None,
    ):
        self.plan = plan
        platform = platform or platforms.current()
        dtype = plan.format.dtype
        pages = plan.format.num_blocks(plan.max_tokens) + plan.chunk_blocks  # room for padding
        run = math.lcm(*(platform.prefill_pages(cfg, size) for size in plan.sizes))
        params = llama.prepare(cfg, params, dtype, platform)
        self._storage = platform.storage_dtype(dtype)
        self._steps = PipelineSteps(
            cfg,
            platform,
            mesh,
            params,
            dtype=dtype,
            sizes=plan.sizes,
            num_slots=plan.num_slots,
            num_pages=-(-pages // run) * run,
        )
        self.own_stages = [
            stage
            for stage in range(mesh.shape[STAGE])
            if all(device.process_index == jax.process_index() for device in mesh.devices[:, stage].flat)
        ]
        self._head_device = self._steps.last_device
        self._drawing = None
        if self._head_device.process_index == jax.process_index():
            place = lambda array: jax.device_put(array, self._head_device)  # noqa: E731
            head = jax.tree.map(place, {name: params[name] for name in ("final_norm", "lm_head")})
            self._drawing = Drawing(cfg, platform, head, batches=[1], place=place)
        self._compiles = process_compiles()

    @property
    def compiles(self) -> int:
        return self._compiles.total

    @property
    def is_ready(self) -> bool:
        return self._steps.is_compiled

    def start(self) -> None:
        """Compile everything; a drawing also runs once."""
        self._steps.compile(buckets(1, self.plan.load_blocks))
        if self._drawing is not None:
            self._drawing.compile()
            self._drawing.warm_up()

    def reset(self) -> None:
        self._steps.reset()
        if self._drawing is not None:
            self._drawing.reset()

    def tick(
        self, tick: Tick, tokens: np.ndarray, sample: Sampling | None, prompt: Sequence[int] | np.ndarray
    ) -> _Ran:
        return _Ran(self, self._steps.tick(tick, tokens), sample, list(prompt))

    def insert(self, stage: int, slot: int, first_page: int, blocks: np.ndarray) -> None:
        self._steps.insert(stage, slot, first_page, blocks.view(self._storage))

    def draw(self, given: Given, sample: Sampling, prompt: Sequence[int]) -> Sampled:
        """The first token of an answer, after the chunk on the last stage."""
        if self._drawing is None:
            raise ValueError("tokens are drawn where the last stage is")
        if sample.looks_back:
            self._drawing.remember(0, prompt, [])
        drawn = self._drawing.start(
            given.row_on(self._head_device), one_row(sample, step=0), np.ones(1, np.bool_)
        )
        first = self._drawing.finish(drawn)
        return Sampled(int(first.tokens[0]), float(first.logprobs[0]), first.top(0, sample.num_top))

"""CPP over forced host devices beside the single-device step, on a model that compiles in a second."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import cache, llama, rope, ticks
from models.config import LlamaConfig
from models.platform import CPU
from models.sharding import MeshShape
from models.split import ByRows
from mooncake_jax.engine.pipeline_steps import PipelineSteps

Z = 8
PLATFORM = dataclasses.replace(CPU, attention_rows=2048, prefill_key_tokens=(64, 64))
NUM_SLOTS = 2
TOLERANCE = 1e-4


class Request(NamedTuple):
    """A queued prompt: blocks that are cached, tokens to compute, and in chunks of how many."""

    cached: int
    new: int
    chunk: int


class Computed(NamedTuple):
    """Of one prompt: KV blocks `[M, L, K, 2, Z, H]`, and the logits after its last token, `[V]`."""

    blocks: np.ndarray
    logits: np.ndarray


class Scene:
    """A random model of `num_layers`, pipelines over meshes of it, and the single-device step."""

    def __init__(self, num_layers: int, sizes: Sequence[int], max_tokens: int):
        self.cfg = LlamaConfig(
            vocab_size=61,
            d_model=24,
            d_ff=40,
            num_layers=num_layers,
            num_heads=8,
            num_kv_heads=4,
            head_dim=6,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            max_position=max_tokens,
            block_tokens=Z,
            layers_per_group=1,
            attention_bias=True,
            mlp_bias=True,
        )
        self.sizes, self.max_tokens = sizes, max_tokens
        self.num_pages = (max_tokens + max(sizes)) // Z
        self.params = llama.prepare(self.cfg, llama.init_params(self.cfg, 0, "float32"), "float32", PLATFORM)
        head = {name: self.params[name] for name in ("final_norm", "lm_head")}
        self._head = jax.jit(functools.partial(llama.head, self.cfg, PLATFORM, head))
        self._layer = jax.jit(self._one_layer)
        self.steps = functools.cache(self._steps)

    def _steps(self, shape: MeshShape) -> PipelineSteps:
        steps = PipelineSteps(
            self.cfg,
            PLATFORM,
            shape.make(),
            self.params,
            dtype="float32",
            sizes=self.sizes,
            num_slots=NUM_SLOTS,
            num_pages=self.num_pages,
        )
        steps.compile([1])
        return steps

    def _one_layer(self, layer, x, num_valid):
        pages = [jnp.zeros(cache.pages_shape(self.cfg, 1, self.num_pages), jnp.float32)]
        zero = jnp.int32(0)
        x, _, blocks = llama.prefill_group(
            self.cfg,
            PLATFORM,
            ByRows(1),
            [layer],
            x,
            rope.rotation(self.cfg, jnp.arange(x.shape[0])),
            pages,
            zero,
            zero,
            num_valid,
        )
        return x, blocks

    def alone(self, tokens: np.ndarray) -> Computed:
        """The single-device step over the whole prompt at once."""
        padded = np.zeros(self.max_tokens, np.int32)
        padded[: len(tokens)] = tokens
        x, blocks = self.params["embed"][padded], []
        for layer in self.params["layers"]:
            x, new = self._layer(layer, x, np.int32(len(tokens)))
            blocks.append(np.asarray(new))
        logits = self._head(np.asarray(x)[len(tokens) - 1 : len(tokens)])
        return Computed(np.concatenate(blocks, axis=1), np.asarray(logits)[0])

    def random_prompt(self, seed: int, length: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.cfg.vocab_size, length).astype(np.int32)

    def load(self, shape: MeshShape, slot: int, blocks: np.ndarray) -> None:
        """Cached prefix blocks `[M, L, K, 2, Z, H]`, one at a time, stage by stage."""
        layers = self.cfg.num_layers // shape.stage
        for first in range(len(blocks)):
            for stage in range(shape.stage):
                part = blocks[first : first + 1, stage * layers : (stage + 1) * layers]
                self.steps(shape).insert(stage, slot, first, np.ascontiguousarray(part))

    def run(self, shape: MeshShape, prompts: list[np.ndarray], chunks: list[ticks.Chunk]) -> list[Computed]:
        """Compute these chunks of `prompts`; a chunk's request is the prompt's index."""
        cfg, layers = self.cfg, self.cfg.num_layers // shape.stage
        kv = [
            np.zeros((-(-len(p) // Z), cfg.num_layers, cfg.num_kv_heads, 2, Z, cfg.head_dim)) for p in prompts
        ]
        logits = [np.zeros(0)] * len(prompts)
        for tick in ticks.stream(chunks, shape.stage):
            entering = tick[0]
            tokens = (
                prompts[entering.request][entering.start : entering.stop] if entering else np.zeros(0, int)
            )
            given = self.steps(shape).tick(tick, tokens)
            for stage, chunk in enumerate(tick):
                if chunk is not None:
                    first, count = chunk.start // Z, -(-chunk.num_tokens // Z)
                    here = slice(stage * layers, (stage + 1) * layers)
                    kv[chunk.request][first : first + count, here] = given.stage_blocks(stage)[:count]
            if (done := tick[-1]) is not None and done.is_last:
                logits[done.request] = np.asarray(
                    self._head(np.asarray(given.row_on(self.steps(shape).last_device)))
                )[0]
        return [Computed(*pair) for pair in zip(kv, logits, strict=True)]

    def worst(self, shape: MeshShape, seed: int, requests: Sequence[Request]) -> float:
        """Queue the requests without a gap: the largest difference of logits or new KV from the single device's."""
        prompts = [self.random_prompt(seed + i, r.cached * Z + r.new) for i, r in enumerate(requests)]
        expected = [self.alone(prompt) for prompt in prompts]
        chunks = []
        for i, request in enumerate(requests):
            self.load(shape, i % NUM_SLOTS, expected[i].blocks[: request.cached])
            chunks += ticks.cut(i, i % NUM_SLOTS, request.cached * Z, len(prompts[i]), request.chunk)
        worst = 0.0
        for i, got in enumerate(self.run(shape, prompts, chunks)):
            new = slice(requests[i].cached, len(got.blocks))
            worst = max(
                worst,
                float(np.abs(got.blocks[new] - expected[i].blocks[new]).max()),
                float(np.abs(got.logits - expected[i].logits).max()),
            )
        return worst

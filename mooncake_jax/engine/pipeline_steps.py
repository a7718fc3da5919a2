"""The compiled ticks of chunked pipeline parallelism, and what lies on the devices between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import llama, pipeline
from models.config import LlamaConfig
from models.platform import Platform
from models.sharding import STAGE
from models.ticks import Tick
from mooncake_jax.engine.compiles import program


class Given(NamedTuple):
    """What one tick gave out. Its arrays are not part of what the next tick consumes."""

    blocks: jax.Array  # [X, M, l, K, 2, Z, H]
    last: jax.Array  # [X, D] float32

    def stage_blocks(self, stage: int) -> np.ndarray:
        """New KV of a stage's chunk, `[M, l, K, 2, Z, H]`; waits for the tick. In place where one device has it."""
        shares = [s for s in self.blocks.addressable_shards if s.index[0].start in (stage, None)]
        shares.sort(key=lambda share: share.index[3].start or 0)
        parts = [np.asarray(share.data)[0] for share in shares]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)

    def row_on(self, device: Any) -> jax.Array:
        """On a device of a stage: the activations of its chunk's last token after the stage's layers, `[1, D]`."""
        return next(share.data for share in self.last.addressable_shards if share.device == device)


class PipelineSteps:
    """One program per chunk size serves all ticks: a tick takes the smallest that holds every stage's chunk.

    `params` are `llama.prepare`d; `mesh` has the axes of `models.sharding`. Owned by one thread.
    """

    def __init__(
        self,
        cfg: LlamaConfig,
        platform: Platform,
        mesh: Mesh,
        params: llama.Params,
        *,
        dtype: str,
        sizes: Sequence[int],
        num_slots: int,
        num_pages: int,
    ) -> None:
        self.num_stages = mesh.shape[STAGE]
        self.last_device = mesh.devices[0, -1, 0]  # of the last stage: what needs only one is done there
        self.sizes = sorted(sizes)
        self._cfg, self._platform, self._mesh = cfg, platform, mesh
        self._storage = platform.storage_dtype(dtype)
        self._layers = pipeline.place_layers(cfg, mesh, params["layers"])
        self._by_stage = NamedSharding(mesh, PartitionSpec(STAGE))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._embedding = _put(params["embed"], self._everywhere)
        self._pages_like = pipeline.abstract_pages(cfg, mesh, self._storage, num_slots, num_pages)
        self._x_like = pipeline.abstract_x(cfg, mesh, dtype, self.sizes[-1])
        self._empty = program(
            lambda: [jnp.zeros(like.shape, like.dtype) for like in [self._x_like, *self._pages_like]],
            out_shardings=[like.sharding for like in [self._x_like, *self._pages_like]],
        )
        self._ticks: dict[int, Callable[..., Any]] = {}
        self._inserts: dict[int, Callable[..., Any]] = {}
        self.reset()

    @property
    def is_compiled(self) -> bool:
        return bool(self._ticks)

    def compile(self, insert_runs: Sequence[int]) -> None:
        """All ticks, and insertions of so many prefix blocks at a time."""
        numbers = self._put_numbers([(0, 0, 0)] * self.num_stages)
        for size in self.sizes:
            step = pipeline.tick(self._cfg, self._platform, self._mesh, size)
            tokens = self._put_tokens(np.zeros(size, np.int32))
            self._ticks[size] = program(
                step, self._layers, self._embedding, self._x, self._pages, tokens, numbers, donate=[2, 3]
            )
        for run in insert_runs:
            self._inserts[run] = program(
                pipeline.insert(self._mesh), self._pages, self._blocks_like(run), numbers, donate=[0]
            )

    def reset(self) -> None:
        """Empty caches, also after a failed tick has consumed them."""
        self._x, *self._pages = self._empty()

    def tick(self, tick: Tick, tokens: np.ndarray) -> Given:
        """Run one tick; returns before the devices are done. `tokens` are those of the chunk that enters stage 0."""
        longest = max(chunk.num_tokens for chunk in tick if chunk is not None)
        size = next(size for size in self.sizes if size >= longest)
        padded = np.zeros(size, np.int32)
        padded[: tokens.size] = tokens
        result = self._ticks[size](
            self._layers,
            self._embedding,
            self._x,
            self._pages,
            self._put_tokens(padded),
            self._put_numbers(pipeline.work(tick)),
        )
        self._x, self._pages = result.x, result.pages
        return Given(result.blocks, result.last)

    def insert(self, stage: int, slot: int, first_page: int, blocks: np.ndarray) -> None:
        """Put cached prefix blocks `[M, l, K, 2, Z, H]` of a stage's layers into its cache.

        `blocks` may be read in place until the next tick is done: give up the array.
        """
        like = self._blocks_like(len(blocks))
        nothing = np.zeros((), self._storage)

        def share(index: Any) -> np.ndarray:
            (x,) = range(*index[0].indices(self.num_stages))
            part = blocks[index[1:]][None]
            return part if x == stage else np.broadcast_to(nothing, part.shape)

        given = jax.make_array_from_callback(like.shape, like.sharding, share)
        where = np.zeros((self.num_stages, 3), np.int32)
        where[stage] = slot, first_page, 1
        self._pages = self._inserts[len(blocks)](self._pages, given, self._put_numbers(where))

    def wait(self) -> None:
        """Until all ticks are done."""
        jax.block_until_ready((self._x, self._pages))

    def compiled_text(self, size: int) -> str:
        """The optimised HLO of a tick."""
        return self._ticks[size].as_text()  # pyright: ignore[reportFunctionMemberAccess]

    def temporary_nbytes(self, size: int) -> int:
        """What a tick needs per device beside its arguments and results, as XLA planned it."""
        return self._ticks[size].memory_analysis().temp_size_in_bytes  # pyright: ignore[reportFunctionMemberAccess]

    def _blocks_like(self, count: int) -> jax.ShapeDtypeStruct:
        return pipeline.abstract_blocks(self._cfg, self._mesh, self._storage, count)

    def _put_tokens(self, tokens: np.ndarray) -> jax.Array:
        return _put(tokens, self._everywhere)

    def _put_numbers(self, numbers: Any) -> jax.Array:
        return _put(np.asarray(numbers, np.int32), self._by_stage)


def _put(array: np.ndarray, where: NamedSharding) -> jax.Array:
    """On the devices of this process; others put their own shares (`jax.device_put` would compare all processes')."""
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])

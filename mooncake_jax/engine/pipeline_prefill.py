"""The prefill engine on a mesh of stages and heads: chunked pipeline parallelism behind the contract.

A tile is several chunks, which enter the pipeline when `prefill` is called; ticks are run while somebody asks for
items, and serve all tiles that are open. So the pipeline does not drain between two tiles, of one request or of two,
as long as the next is opened before the last items of the one before are taken.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from models import llama, ticks
from models import platform as platforms
from models.config import LlamaConfig
from models.platform import Platform
from models.sharding import MeshShape
from models.ticks import Chunk, Tick
from mooncake_jax.engine.compiles import binary_runs, buckets, process_compiles
from mooncake_jax.engine.contract import GroupKV, PromptScores, Sampled
from mooncake_jax.engine.draw_rows import one_row
from mooncake_jax.engine.drawing import Drawing
from mooncake_jax.engine.jax_prefill import block_format
from mooncake_jax.engine.pipeline_steps import Given, PipelineSteps
from mooncake_jax.engine.tile_checks import check_prefix, checked_tokens
from mooncake_jax.request import Sampling

_SMALLEST_CHUNK = 16
_LOAD_BLOCKS = 16  # prefix blocks that one program inserts, at most; a power of two
_CHUNKS_PER_STAGE = 2  # of a tile: the more, the fewer bubbles where tiles do not overlap


@dataclass(eq=False)
class _Tile:
    """One call of `prefill`."""

    slot: int
    start: int
    tokens: np.ndarray
    load: Callable[[int], Sequence[np.ndarray]] | None
    sample: Sampling | None
    prompt: np.ndarray | None
    blocks: list[np.ndarray]  # of each layer group, [M, l, K, 2, Z, H]
    ready: deque[GroupKV | Sampled] = field(default_factory=deque)
    error: Exception | None = None
    is_dropped: bool = False  # nobody asks for its items any more
    is_done: bool = False  # all its items are ready


class _Running(NamedTuple):
    """A tick that was dispatched."""

    tick: Tick
    tiles: tuple[_Tile | None, ...]  # of each stage's chunk
    given: Given


class PipelinePrefillEngine:
    """`mooncake_jax.engine.contract.PrefillEngine` on the devices of a mesh. Owned by one thread.

    `params` is a host pytree (see `models.llama.param_table`) in `dtype`. Raises ValueError with the reason for a mesh
    that the model or the devices do not fit. Prompts are not scored (`targets`).
    """

    def __init__(
        self,
        cfg: LlamaConfig,
        params: llama.Params,
        *,
        mesh: MeshShape,
        dtype: str,
        num_slots: int,
        max_tokens: int,
        fingerprint: bytes,
        chunk_tokens: int = 0,
        platform: Platform | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """`chunk_tokens` 0: as many as the platform's largest tile."""
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
        self.format = block_format(cfg, dtype)
        self.fingerprint, self.vocab_size = fingerprint, cfg.vocab_size
        self.max_tokens, self.num_slots = max_tokens, num_slots
        self._platform = platform or platforms.current()
        Z = cfg.block_tokens
        self._chunk_tokens = -(-min(chunk_tokens or self._platform.tile_tokens, max_tokens) // Z) * Z
        self.tile_tokens = self._chunk_tokens * min(
            _CHUNKS_PER_STAGE * mesh.stage, -(-max_tokens // self._chunk_tokens)
        )
        sizes = buckets(min(_SMALLEST_CHUNK, self._chunk_tokens), self._chunk_tokens)
        run = math.lcm(*(self._platform.prefill_pages(cfg, size) for size in sizes))
        pages = -(-max_tokens // Z) + self._chunk_tokens // Z  # room for the padding of the last chunk
        params = llama.prepare(cfg, params, dtype, self._platform)
        self._storage = self._platform.storage_dtype(dtype)
        self._steps = PipelineSteps(
            cfg,
            self._platform,
            mesh.make(devices),
            params,
            dtype=dtype,
            sizes=sizes,
            num_slots=num_slots,
            num_pages=-(-pages // run) * run,
        )
        self._head_device = self._steps.last_device
        head = {name: params[name] for name in ("final_norm", "lm_head")}
        self._drawing = Drawing(
            cfg,
            self._platform,
            jax.device_put(head, self._head_device),
            batches=[1],
            place=lambda array: jax.device_put(array, self._head_device),
        )
        self._groups_per_stage = self.format.num_groups // mesh.stage
        self._load_blocks = min(_LOAD_BLOCKS, 1 << ((-(-max_tokens // Z)).bit_length() - 1))
        self._compiles, self._ready_at = process_compiles(), None
        self._numbers = itertools.count()
        self._reset()

    @property
    def compiles_after_ready(self) -> int:
        """New executables in this process since the last `warm_up`; 0 before the first."""
        return 0 if self._ready_at is None else self._compiles.total - self._ready_at

    @property
    def bubble_fraction(self) -> float:
        """Of all ticks so far."""
        return ticks.Occupancy(self._busy, self._cells).bubble_fraction

    def attach(self, memory: np.ndarray) -> None:
        """See the contract: blocks are copied into the devices' caches."""

    def warm_up(self) -> None:
        """Compile and run every program once. May be called again: compiles nothing, and counts from then on."""
        if not self._steps.is_compiled:
            self._steps.compile(buckets(1, self._load_blocks))
            self._drawing.compile()
            self._drawing.warm_up()
            block = np.zeros(self.format.group_shape, self.format.item_dtype)
            for size in self._steps.sizes:
                tokens = np.zeros(min(size, self.max_tokens), np.int32)
                for _ in self.prefill(0, tokens, 0, sample=Sampling()):
                    pass
            for count in buckets(1, self._load_blocks):
                if (count * self.format.block_tokens) < self.max_tokens:
                    for _ in self.prefill(
                        0,
                        np.zeros(1, np.int32),
                        count * self.format.block_tokens,
                        load=lambda group, count=count: [block] * count,
                    ):
                        pass
            self._filled[:] = 0
            self._busy = self._cells = 0
        self._ready_at = self._compiles.total

    def prefill(
        self,
        slot: int,
        tokens: np.ndarray,
        start: int,
        *,
        load: Callable[[int], Sequence[np.ndarray]] | None = None,
        sample: Sampling | None = None,
        prompt: np.ndarray | None = None,
        targets: np.ndarray | None = None,
    ) -> Generator[GroupKV | PromptScores | Sampled]:
        """See the contract. The tile's chunks enter the pipeline now; several tiles may be open at a time."""
        if not self._steps.is_compiled:
            raise RuntimeError("prefill engine: call warm_up() before the first use")
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} of {self.num_slots}")
        tokens = checked_tokens(self, slot, tokens, start, None if load else int(self._filled[slot]))
        if sample is not None and sample.looks_back and prompt is None:
            raise ValueError("penalties look back at the prompt: give it")
        if targets is not None:
            raise ValueError(
                "a prefill engine on a mesh of stages does not score prompts (echo with logprobs)"
            )
        count = self.format.num_blocks(tokens.size)
        blocks = [
            np.empty((count, *self.format.group_shape), self.format.item_dtype)
            for _ in range(self.format.num_groups)
        ]
        tile = _Tile(slot, start, tokens, load, sample, prompt, blocks)
        for chunk in ticks.cut(next(self._numbers), slot, start, start + tokens.size, self._chunk_tokens):
            self._entering.append((chunk, tile))
        self._filled[slot] = start + tokens.size
        return self._items(tile)

    def _items(self, tile: _Tile) -> Generator[GroupKV | PromptScores | Sampled]:
        try:
            while True:
                while tile.ready:
                    yield tile.ready.popleft()
                if tile.error is not None:
                    raise tile.error
                if tile.is_done:
                    return
                self._advance()
        finally:
            if not tile.is_done:
                self._drop(tile)

    def _drop(self, tile: _Tile) -> None:
        """Chunks that did not enter will not; those on the way finish for no one."""
        tile.is_dropped = True
        self._entering = deque(pair for pair in self._entering if pair[1] is not tile)
        self._filled[tile.slot] = 0

    def _advance(self) -> None:
        """Dispatch the next tick, if there is anything to compute, and take in the one before it."""
        try:
            if self._entering or any(self._tick[:-1]):
                self._dispatch()
                if len(self._running) < 2 and (self._entering or any(self._tick[:-1])):
                    return
            self._collect(self._running.popleft())
        except Exception as error:
            self._fail(error)

    def _dispatch(self) -> None:
        chunk, tile = self._entering.popleft() if self._entering else (None, None)
        self._tick = ticks.shift(self._tick, chunk)
        self._tiles = (tile, *self._tiles[:-1])
        for stage, (chunk, tile) in enumerate(zip(self._tick, self._tiles, strict=True)):
            if chunk is not None and tile is not None and tile.load is not None and chunk.start == tile.start:
                self._load_prefix(stage, tile)
        first = self._tiles[0]
        entering = self._tick[0]
        tokens = np.zeros(0, np.int32)
        if first is not None and entering is not None:
            tokens = first.tokens[entering.start - first.start : entering.stop - first.start]
        given = self._steps.tick(self._tick, tokens)
        self._busy += sum(chunk is not None for chunk in self._tick)
        self._cells += len(self._tick)
        self._running.append(_Running(self._tick, self._tiles, given))

    def _load_prefix(self, stage: int, tile: _Tile) -> None:
        """The prefix of a stage's layers, before its first chunk. What `load` raises is the tile's error, nobody else's."""
        if tile.load is None or tile.is_dropped or tile.error is not None:
            return
        count = tile.start // self.format.block_tokens
        groups = range(stage * self._groups_per_stage, (stage + 1) * self._groups_per_stage)
        try:
            prefix = [tile.load(group) for group in groups]
            for group, blocks in zip(groups, prefix, strict=True):
                check_prefix(self.format, group, blocks, count)
        except Exception as error:
            tile.error = error
            return
        first = 0
        for run in binary_runs(count, self._load_blocks):
            part = np.stack(
                [np.concatenate([blocks[i] for blocks in prefix]) for i in range(first, first + run)]
            )
            self._steps.insert(stage, tile.slot, first, part.view(self._storage))
            first += run

    def _collect(self, ran: _Running) -> None:
        for stage, (chunk, tile) in enumerate(zip(ran.tick, ran.tiles, strict=True)):
            if chunk is None or tile is None or tile.is_dropped or tile.error is not None:
                continue
            self._take(stage, chunk, tile, ran.given)

    def _take(self, stage: int, chunk: Chunk, tile: _Tile, given: Given) -> None:
        """A chunk's new KV of a stage; what the tile's last chunk completes is ready."""
        Z, l = self.format.block_tokens, self.format.layers_per_group  # noqa: E741
        new = given.stage_blocks(stage).view(self.format.item_dtype)
        first, count = (chunk.start - tile.start) // Z, self.format.num_blocks(chunk.num_tokens)
        for i in range(self._groups_per_stage):
            group = stage * self._groups_per_stage + i
            tile.blocks[group][first : first + count] = new[:count, i * l : (i + 1) * l]
            if chunk.is_last:
                tile.ready.append(GroupKV(group, tile.start // Z, tile.blocks[group]))
        if chunk.is_last and stage == len(self._tick) - 1:
            if tile.sample is not None:
                tile.ready.append(self._draw(tile, given.row_on(self._head_device)))
            tile.is_done = True

    def _draw(self, tile: _Tile, row: jax.Array) -> Sampled:
        assert tile.sample is not None
        if tile.sample.looks_back and tile.prompt is not None:
            self._drawing.remember(0, tile.prompt, [])
        drawn = self._drawing.start(row, one_row(tile.sample, step=0), np.ones(1, np.bool_))
        first = self._drawing.finish(drawn)
        return Sampled(int(first.tokens[0]), float(first.logprobs[0]), first.top(0, tile.sample.num_top))

    def _fail(self, error: Exception) -> None:
        """A failed step may have consumed its donated cache: start again from an empty one. All open tiles end."""
        failure = RuntimeError(f"a step failed, and every slot is empty now: {error}")
        failure.__cause__ = error
        open_tiles = {tile for _, tile in self._entering} | {t for r in self._running for t in r.tiles if t}
        for tile in open_tiles | {tile for tile in self._tiles if tile is not None}:
            tile.error = tile.error or failure
        self._reset()

    def _reset(self) -> None:
        self._steps.reset()
        self._drawing.reset()
        X = self._steps.num_stages
        self._entering: deque[tuple[Chunk, _Tile]] = deque()
        self._tick: Tick = (None,) * X
        self._tiles: tuple[_Tile | None, ...] = (None,) * X
        self._running: deque[_Running] = deque()
        self._filled = np.zeros(self.num_slots, np.int64)  # leading tokens whose KV each slot holds, or will
        self._busy = self._cells = 0

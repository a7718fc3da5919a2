"""The prefill engine on a mesh of stages and heads: chunked pipeline parallelism behind the contract.

A tile is several chunks, which enter the pipeline when `prefill` is called; ticks are run while somebody asks for
items, and serve all tiles that are open. So the pipeline does not drain between two tiles, of one request or of two,
as long as the next is opened before the last items of the one before are taken.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from models import ticks
from models.ticks import Chunk, Tick
from mooncake_jax.engine.compiles import binary_runs, buckets
from mooncake_jax.engine.contract import EngineLostError, GroupKV, Sampled, TileItems
from mooncake_jax.engine.stages import Ran, Stages
from mooncake_jax.engine.tile_checks import check_prefix, checked_tokens
from mooncake_jax.request import Sampling


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
    ran: Ran


class PipelinePrefillEngine:
    """`mooncake_jax.engine.contract.PrefillEngine` over `stages`. Owned by one thread; scores no prompts (`targets`)."""

    def __init__(self, stages: Stages):
        self._stages, self._plan = stages, stages.plan
        self.format, self.fingerprint = self._plan.format, self._plan.fingerprint
        self.vocab_size, self.max_tokens = self._plan.vocab_size, self._plan.max_tokens
        self.num_slots, self.tile_tokens = self._plan.num_slots, self._plan.tile_tokens
        self._ready_at: int | None = None
        self._feed: Callable[[], None] = lambda: None
        self._numbers = itertools.count()
        self._busy = self._cells = 0
        self._clear()

    @property
    def compiles_after_ready(self) -> int:
        """New executables in the processes of the stages since the last `warm_up`; 0 before the first."""
        return 0 if self._ready_at is None else self._stages.compiles - self._ready_at

    @property
    def bubble_fraction(self) -> float:
        """Of all ticks since `warm_up`."""
        return ticks.Occupancy(self._busy, self._cells).bubble_fraction

    def attach(self, memory: np.ndarray) -> None:
        """See the contract: blocks are copied into the devices' caches."""

    def feed_from(self, feed: Callable[[], None]) -> None:
        """See the contract."""
        self._feed = feed

    def warm_up(self) -> None:
        """Compile and run every program once. May be called again: compiles nothing, and counts from then on."""
        if not self._stages.is_ready:
            self._clear()
            self._stages.start()
            block = np.zeros(self.format.group_shape, self.format.item_dtype)
            for size in self._plan.sizes:
                tokens = np.zeros(min(size, self.max_tokens), np.int32)
                for _ in self.prefill(0, tokens, 0, sample=Sampling()):
                    pass
            for count in buckets(1, self._plan.load_blocks):
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
        self._ready_at = self._stages.compiles

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
    ) -> TileItems:
        """See the contract. The tile's chunks enter the pipeline now; several tiles may be open at a time."""
        if not self._stages.is_ready:
            if self._ready_at is not None:
                raise EngineLostError("the stages of the pipeline are not there")
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
        chunks = ticks.cut(next(self._numbers), slot, start, start + tokens.size, self._plan.chunk_tokens)
        self._entering.extend((chunk, tile) for chunk in chunks)
        self._filled[slot] = start + tokens.size
        return _Items(self, tile)

    def next_item(self, tile: _Tile) -> GroupKV | Sampled:
        """Runs ticks until `tile` has one more. Raises StopIteration after the last, or its error."""
        while not tile.ready:
            if tile.error is not None:
                self.drop(tile)
                raise tile.error
            if tile.is_done or tile.is_dropped:
                raise StopIteration
            self._advance()
        return tile.ready.popleft()

    def drop(self, tile: _Tile) -> None:
        """Nobody asks for its items any more: chunks that did not enter will not; those on the way finish for no one."""
        if tile.is_done or tile.is_dropped:
            return
        tile.is_dropped = True
        self._entering = deque(pair for pair in self._entering if pair[1] is not tile)
        self._filled[tile.slot] = 0

    def _advance(self) -> None:
        """Dispatch the next tick, if there is anything to compute, and take in the one before it."""
        if not self._entering:
            self._feed()
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
        leaving, last = self._tick[-1], self._tiles[-1]
        sample, prompt = None, np.zeros(0, np.int32)
        if leaving is not None and last is not None and leaving.is_last and not last.is_dropped:
            sample = last.sample
            if sample is not None and sample.looks_back and last.prompt is not None:
                prompt = last.prompt
        ran = self._stages.tick(self._tick, tokens, sample, prompt)
        self._busy += sum(chunk is not None for chunk in self._tick)
        self._cells += len(self._tick)
        self._running.append(_Running(self._tick, self._tiles, ran))

    def _load_prefix(self, stage: int, tile: _Tile) -> None:
        """The prefix of a stage's layers, before its first chunk. What `load` raises is the tile's error, nobody else's."""
        if tile.load is None or tile.is_dropped or tile.error is not None:
            return
        count = tile.start // self.format.block_tokens
        groups = range(stage * self._plan.groups_per_stage, (stage + 1) * self._plan.groups_per_stage)
        try:
            prefix = [tile.load(group) for group in groups]
            for group, blocks in zip(groups, prefix, strict=True):
                check_prefix(self.format, group, blocks, count)
        except Exception as error:
            tile.error = error
            return
        first = 0
        for run in binary_runs(count, self._plan.load_blocks):
            part = np.stack(
                [np.concatenate([blocks[i] for blocks in prefix]) for i in range(first, first + run)]
            )
            self._stages.insert(stage, tile.slot, first, part)
            first += run

    def _collect(self, running: _Running) -> None:
        for stage, (chunk, tile) in enumerate(zip(running.tick, running.tiles, strict=True)):
            if chunk is None or tile is None or tile.is_dropped or tile.error is not None:
                continue
            self._take(stage, chunk, tile, running.ran)

    def _take(self, stage: int, chunk: Chunk, tile: _Tile, ran: Ran) -> None:
        """A chunk's new KV of a stage; what the tile's last chunk completes is ready."""
        Z, l = self.format.block_tokens, self.format.layers_per_group  # noqa: E741
        new = ran.blocks(stage)
        first, count = (chunk.start - tile.start) // Z, self.format.num_blocks(chunk.num_tokens)
        for i in range(self._plan.groups_per_stage):
            group = stage * self._plan.groups_per_stage + i
            tile.blocks[group][first : first + count] = new[:count, i * l : (i + 1) * l]
            if chunk.is_last:
                tile.ready.append(GroupKV(group, tile.start // Z, tile.blocks[group]))
        if chunk.is_last and stage == len(self._tick) - 1:
            if tile.sample is not None:
                tile.ready.append(ran.sampled())
            tile.is_done = True

    def _fail(self, error: Exception) -> None:
        """A failed step may have consumed its donated cache: start again from an empty one. All open tiles end."""
        failure: Exception = error
        if not isinstance(error, EngineLostError):
            failure = RuntimeError(f"a step failed, and every slot is empty now: {error}")
            failure.__cause__ = error
        open_tiles = {tile for _, tile in self._entering} | {t for r in self._running for t in r.tiles if t}
        for tile in open_tiles | {tile for tile in self._tiles if tile is not None}:
            tile.error = tile.error or failure
        self._clear()
        if not isinstance(error, EngineLostError):
            self._stages.reset()

    def _clear(self) -> None:
        X = self._plan.num_stages
        self._entering: deque[tuple[Chunk, _Tile]] = deque()
        self._tick: Tick = (None,) * X
        self._tiles: tuple[_Tile | None, ...] = (None,) * X
        self._running: deque[_Running] = deque()
        self._filled = np.zeros(self.num_slots, np.int64)  # leading tokens whose KV each slot holds, or will


class _Items:
    """`contract.TileItems` of one tile."""

    def __init__(self, engine: PipelinePrefillEngine, tile: _Tile):
        self._engine, self._tile = engine, tile

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> GroupKV | Sampled:
        return self._engine.next_item(self._tile)

    def close(self) -> None:
        self._engine.drop(self._tile)

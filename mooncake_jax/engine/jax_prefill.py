"""The prefill engine: prompts tile by tile into device slots, one compiled program per layer group and tile
size.

A tile is dispatched group by group and nothing waits for the device, so a group's KV is out while later
groups still compute. Tiles are padded to a few sizes; everything is compiled in `warm_up`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvstore.block import BlockFormat
from models import cache, llama, split
from models import platform as platforms
from models.attention import StoredBlocks
from models.config import LlamaConfig
from models.platform import Platform
from models.rope import Rotation
from mooncake_jax.engine.compiles import binary_runs, buckets, process_compiles, program
from mooncake_jax.engine.contract import GroupKV, PromptScores, Sampled
from mooncake_jax.engine.draw_rows import one_row
from mooncake_jax.engine.drawing import Drawing
from mooncake_jax.engine.mesh import EngineMesh
from mooncake_jax.engine.store_memory import StoreMemory
from mooncake_jax.engine.tile_checks import check_prefix, checked_tokens
from mooncake_jax.engine.tile_steps import TileSteps
from mooncake_jax.request import Sampling

_SMALLEST_TILE = 16
_LOAD_BLOCKS = 32  # prefix blocks that one program inserts, at most; a power of two


def block_format(cfg: LlamaConfig, dtype: str) -> BlockFormat:
    """The KV blocks of this model in this dtype."""
    return BlockFormat(
        num_layers=cfg.num_layers,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        block_tokens=cfg.block_tokens,
        dtype=dtype,
        layers_per_group=cfg.layers_per_group,
    )


class JaxPrefillEngine:
    """`mooncake_jax.engine.contract.PrefillEngine` on JAX. Owned by one thread.

    `params` is a host pytree (see `models.llama.param_table`) in `dtype` ("bfloat16" or "float32"). A tile is
    split over `devices` (None: the first one; as many of them as the model cuts into) as
    `models.split` says: every device has a cache of its own.
    """

    def __init__(
        self,
        cfg: LlamaConfig,
        params: llama.Params,
        *,
        dtype: str,
        num_slots: int,
        max_tokens: int,
        fingerprint: bytes,
        platform: Platform | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        if not 1 <= max_tokens <= cfg.max_position:
            raise ValueError(
                f"max_tokens {max_tokens}: the model has positions for 1 … {cfg.max_position} tokens"
            )
        if num_slots < 1:
            raise ValueError(f"num_slots must be positive, got {num_slots}")
        self.format = block_format(cfg, dtype)
        self.fingerprint = fingerprint
        self.max_tokens = max_tokens
        self.vocab_size = cfg.vocab_size
        self.num_slots = num_slots
        self._cfg = cfg
        self._platform = platform or platforms.current()
        Z = cfg.block_tokens
        self.tile_tokens = -(-min(self._platform.tile_tokens, max_tokens) // Z) * Z
        self._tiles = buckets(min(_SMALLEST_TILE, self.tile_tokens), self.tile_tokens)
        params = llama.prepare(cfg, params, dtype, self._platform)
        devices = list(devices or jax.local_devices()[:1])
        table = llama.param_table(cfg)["layers"][0]
        self._mesh = EngineMesh(devices[: split.fitting_devices(len(devices), self._tiles, table)])
        self._steps = TileSteps(cfg, self._platform, self._mesh, params, self._tiles)
        head = {name: params[name] for name in ("final_norm", "lm_head")}
        self._head_params = jax.device_put(head, self._mesh.first)
        self._storage = self._platform.storage_dtype(dtype)
        pages = -(-max_tokens // Z) + self.tile_tokens // Z  # room for the padding of the last tile
        run = math.lcm(*self._steps.run_pages)  # attention reads whole runs
        num_pages = -(-pages // run) * run
        pages_shape = cache.pages_shape(cfg, num_slots, num_pages)
        self._empty = program(lambda: jnp.zeros(pages_shape, self._storage), out_shardings=self._mesh.whole)
        self._num_places = num_pages
        self._store: StoreMemory | None = None
        self.attach(np.zeros((1, self.format.nbytes), np.uint8))
        prefix_shape = (-(-max_tokens // Z), *self.format.group_shape)
        self._load_blocks = min(_LOAD_BLOCKS, 1 << (prefix_shape[0].bit_length() - 1))
        self._staging = [np.full(prefix_shape, 0, self.format.item_dtype) for _ in range(2)]  # touched
        self._drawing = Drawing(
            cfg,
            self._platform,
            self._head_params,
            batches=[1],
            scores=True,
            place=lambda array: jax.device_put(array, self._mesh.first),
        )
        self._compiles = process_compiles()
        self._ready_at: int | None = None
        self._cache: list[list[jax.Array]] = []
        self._reset()

    @property
    def compiles_after_ready(self) -> int:
        """New executables in this process since the last `warm_up`; 0 before the first."""
        return 0 if self._ready_at is None else self._compiles.total - self._ready_at

    def attach(self, memory: np.ndarray) -> None:
        """See the contract."""
        if not self._platform.tile_tokens_by_columns:
            return  # it would be copied to the device, for no one to read
        if self._steps.is_compiled and self._store and self._store.num_slots != len(memory):
            raise RuntimeError(
                f"prefill engine: warmed up with store memory of {self._store.num_slots} slots, got {len(memory)}"
            )
        self._store = StoreMemory(self._mesh, self.format, self._storage, self._num_places, memory)

    def feed_from(self, feed: Callable[[], None]) -> None:
        """See the contract: one tile at a time."""

    def warm_up(self) -> None:
        """Compile and run every program once. May be called again: compiles nothing, and counts from then on."""
        if not self._steps.is_compiled:
            self._steps.compile(
                self._cache[0],
                self._store and self._store.nothing(0),
                buckets(1, self._load_blocks),
                self.format.group_shape,
            )
            self._drawing.compile()
            self._drawing.warm_up()
            for tile in self._tiles:
                tokens = np.zeros(min(tile, self.max_tokens), np.int32)
                for _ in self.prefill(0, tokens, 0, sample=Sampling()):
                    pass
            self._warm_up_loading()
            self._filled[:] = 0
        self._ready_at = self._compiles.total

    def _warm_up_loading(self) -> None:
        """Run every insertion and the loop over a prefix: a program's first run costs more than the next ones."""
        Z = self._cfg.block_tokens
        count = min(2 * self._load_blocks - 1, (self.max_tokens - 1) // Z)
        elsewhere = np.zeros(self.format.group_shape, self.format.item_dtype)
        for tile in self._tiles:
            tokens = np.zeros(min(tile, self.max_tokens - count * Z), np.int32)
            for _ in self.prefill(0, tokens, count * Z, load=lambda group: [elsewhere] * count):
                pass
            if self._store is None or not self._steps.takes_stored(tile):
                continue
            blocks = [self._store.block(group, 0) for group in range(self.format.num_groups)]
            for _ in self.prefill(
                0,
                tokens,
                count * Z,
                load=lambda group, blocks=blocks: [blocks[group]] * count,
                sample=Sampling(),
            ):
                pass

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
        """See the contract. Arguments are checked here, before the first item is asked for."""
        tokens = self._check(slot, tokens, start, prefix_held=load is not None)
        if sample is not None and sample.looks_back and prompt is None:
            raise ValueError("penalties look back at the prompt: give it")
        if targets is not None and not 1 <= len(targets) <= tokens.size:
            raise ValueError(f"{len(targets)} targets for {tokens.size} tokens")
        return self._run(slot, tokens, start, load, sample, prompt, targets)

    def _check(self, slot: int, tokens: np.ndarray, start: int, *, prefix_held: bool) -> np.ndarray:
        if not self._steps.is_compiled:
            raise RuntimeError("prefill engine: call warm_up() before the first use")
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} of {self.num_slots}")
        return checked_tokens(self, slot, tokens, start, None if prefix_held else int(self._filled[slot]))

    def _run(
        self,
        slot: int,
        tokens: np.ndarray,
        start: int,
        load: Callable[[int], Sequence[np.ndarray]] | None,
        sample: Sampling | None,
        prompt: np.ndarray | None,
        targets: np.ndarray | None,
    ) -> Generator[GroupKV | PromptScores | Sampled]:
        self._filled[slot] = 0
        try:
            yield from self._steps_of(slot, tokens, start, load, sample, prompt, targets)
        finally:
            if load is not None:  # a call that was left early may still read what `load` gave
                with self._guard():
                    jax.block_until_ready(self._cache)

    def _steps_of(
        self,
        slot: int,
        tokens: np.ndarray,
        start: int,
        load: Callable[[int], Sequence[np.ndarray]] | None,
        sample: Sampling | None,
        prompt: np.ndarray | None,
        targets: np.ndarray | None,
    ) -> Iterator[GroupKV | PromptScores | Sampled]:
        pending: deque[tuple[int, jax.Array]] = deque()
        with self._guard():
            where = self._mesh.numbers(slot, start, tokens.size)
            x, rotation = self._steps.embed(tokens, where)
        # the slot will not hold the prefix: a tile that others follow has it copied
        in_place = load is not None and sample is not None and self._steps.takes_stored(x.shape[0])
        for group in range(self.format.num_groups):
            prefix: Sequence[np.ndarray] = []
            if load is not None:
                prefix = load(group)
                check_prefix(self.format, group, prefix, start // self._cfg.block_tokens)
            with self._guard():
                stored = self._store.find(group, prefix) if self._store and in_place else None
                if stored is None:
                    self._insert_prefix(group, slot, prefix)
                x, blocks = self._dispatch(group, x, rotation, where, stored)
            pending.append((group, blocks))
            if group > 0:  # the device has the next group to do meanwhile
                yield self._finish(*pending.popleft(), start, tokens.size)
        drawn = None
        if sample is not None:
            with self._guard():
                if sample.looks_back and prompt is not None:
                    self._drawing.remember(0, prompt, [])
                row = one_row(sample, step=0)
                drawn = self._drawing.start(self._steps.row(x, tokens.size - 1), row, np.ones(1, np.bool_))
        if not in_place:
            self._filled[slot] = start + tokens.size
        while pending:
            yield self._finish(*pending.popleft(), start, tokens.size)
        if targets is not None:
            with self._guard():
                scores = self._drawing.score(self._steps.in_order(x), targets)
            yield scores
        if sample is not None and drawn is not None:
            with self._guard():
                first = self._drawing.finish(drawn)
            yield Sampled(int(first.tokens[0]), float(first.logprobs[0]), first.top(0, sample.num_top))

    def _dispatch(
        self,
        group: int,
        x: jax.Array,
        rotation: Rotation,
        where: jax.Array,
        stored: StoredBlocks | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        stored = stored or (self._store and self._store.nothing(group))
        x, self._cache[group], blocks = self._steps.group(
            group, x, rotation, self._cache[group], where, stored
        )
        return x, blocks

    def _finish(self, group: int, blocks: jax.Array, start: int, num_valid: int) -> GroupKV:
        with self._guard():
            host = np.asarray(jax.block_until_ready(blocks).addressable_data(0)).view(self.format.item_dtype)
        return GroupKV(group, start // self._cfg.block_tokens, host[: self.format.num_blocks(num_valid)])

    def _insert_prefix(self, group: int, slot: int, blocks: Sequence[np.ndarray]) -> None:
        """Copy a group's prefix from store memory into the cache, a run of blocks at a time.

        The device reads the staging array after this returns. The next group uses the other one, and the
        one after that comes when this group's KV has been waited for.
        """
        staging = self._staging[group % 2]
        first = 0
        for run in binary_runs(len(blocks), self._load_blocks):
            for i in range(first, first + run):
                staging[i] = blocks[i]
            part = staging[first : first + run].view(self._storage)
            self._cache[group] = self._steps.insert(self._cache[group], part, self._mesh.numbers(slot, first))
            first += run

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """A failed step may have consumed its donated cache: start again from an empty one, so that serving
        goes on.

        Other slots lose what they held; their next tile is refused, because it does not follow what the
        slot holds.
        """
        try:
            yield
        except Exception as error:
            self._reset()
            raise RuntimeError(f"a step failed, and every slot is empty now: {error}") from error

    def _reset(self) -> None:
        for pages in jax.tree.leaves(self._cache):  # steps under way read store memory
            with suppress(Exception):
                pages.block_until_ready()
        layers = range(self._cfg.layers_per_group)
        self._cache = [
            [self._empty() for _ in layers]  # memory of each device's own, touched
            for _ in range(self.format.num_groups)
        ]
        self._drawing.reset()
        self._filled = np.zeros(self.num_slots, np.int64)  # leading tokens whose KV each slot holds

"""The decode engine: one token a step for a batch of slots, one compiled program per layer group and batch
size.

A step runs slots 0 … b-1 for the smallest compiled b that covers every active slot, so low slots are cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import cache, llama, rope
from models import draw as draws
from models import platform as platforms
from models.config import LlamaConfig
from models.platform import Platform
from models.rope import Rotation
from models.sharding import MeshShape
from mooncake_jax.engine.compiles import binary_runs, buckets, process_compiles, program
from mooncake_jax.engine.contract import BatchRows, DrawnTokens
from mooncake_jax.engine.decode_devices import DecodeDevices
from mooncake_jax.engine.drawing import Drawing
from mooncake_jax.engine.jax_prefill import block_format

_ROW_DTYPES = tuple(map(np.dtype, ("bool", "int32", "int32")))  # of BatchRows' columns before `draw`


class _Programs(NamedTuple):
    """Everything serving runs, compiled; dictionaries are by batch size, `insert` by number of blocks."""

    embed: dict[int, Callable[..., Any]]
    group: dict[int, Callable[..., Any]]
    insert: dict[int, Callable[..., Any]]
    extract: Callable[..., Any]


class JaxDecodeEngine:
    """`mooncake_jax.engine.contract.DecodeEngine` on JAX. Owned by one thread.

    `params` is a host pytree (see `models.llama.param_table`) in `dtype` ("bfloat16" or "float32"). On one device, unless
    `mesh` has several that share the heads: where devices share memory they read weights no faster than one does.
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
        insert_blocks: int = 8,
        platform: Platform | None = None,
        mesh: MeshShape | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """`devices` are those of `mesh`; None: the first of this process. Raises ValueError with the reason for a mesh
        that the model or the devices do not fit."""
        if not 1 <= max_tokens <= cfg.max_position:
            raise ValueError(
                f"max_tokens {max_tokens}: the model has positions for 1 … {cfg.max_position} tokens"
            )
        if num_slots < 1:
            raise ValueError(f"num_slots must be positive, got {num_slots}")
        if insert_blocks < 1 or insert_blocks & (insert_blocks - 1):
            raise ValueError(f"insert_blocks must be a power of two, got {insert_blocks}")
        self.format = block_format(cfg, dtype)
        self.fingerprint = fingerprint
        self.max_tokens = max_tokens
        self.vocab_size = cfg.vocab_size
        self.num_slots = num_slots
        self._cfg = cfg
        self._platform = platform or platforms.current()
        self._batches = buckets(1, num_slots)
        self._devices = DecodeDevices(_checked(mesh, cfg, devices))
        params = llama.prepare(cfg, params, dtype, self._platform)
        self._embedding = self._devices.whole(params["embed"])
        head = {name: self._devices.on_first(params[name]) for name in ("final_norm", "lm_head")}
        layers, size = self._devices.layers(cfg, params["layers"]), cfg.layers_per_group
        self._layers = [layers[i : i + size] for i in range(0, cfg.num_layers, size)]
        self._storage = self._platform.storage_dtype(dtype)
        self._num_blocks = self.format.num_blocks(max_tokens)
        self.insert_blocks = min(insert_blocks, 1 << (self._num_blocks.bit_length() - 1))
        run = max(self._platform.decode_pages(cfg, batch) for batch in self._batches)
        self._num_pages = -(-self._num_blocks // run) * run  # attention reads whole runs of pages
        self._drawing = Drawing(
            cfg, self._platform, head, batches=self._batches, place=self._devices.on_first
        )
        self._compiles = process_compiles()
        self._ready_at: int | None = None
        self._programs: _Programs | None = None
        self._reset()

    @property
    def compiles_after_ready(self) -> int:
        """New executables in this process since the last `warm_up`; 0 before the first."""
        return 0 if self._ready_at is None else self._compiles.total - self._ready_at

    def warm_up(self) -> None:
        """Compile and run every program once. May be called again: compiles nothing, and counts from then on."""
        if self._programs is None:
            self._programs = self._compile()
            self._drawing.compile()
            self._drawing.warm_up()
            for run in buckets(1, self.insert_blocks):
                self.insert(0, 0, np.zeros((run, *self.format.shape), self.format.item_dtype))
            for batch in self._batches:
                active, tokens, positions = (np.zeros(self.num_slots, dtype) for dtype in _ROW_DTYPES)
                rows = BatchRows(active, tokens, positions, draws.blank(self.num_slots))
                rows.active[batch - 1] = True
                self.generate(rows)
            self.extract(0, 0)
            self._held[:] = False
        self._ready_at = self._compiles.total

    def insert(self, slot: int, first_block: int, blocks: np.ndarray) -> None:
        """See the contract. Raises ValueError for a slot, block or shape out of range."""
        compiled = self._compiled
        self._check_slot(slot)
        if (
            blocks.ndim != 6
            or blocks.shape[1:] != self.format.shape
            or blocks.dtype != self.format.item_dtype
        ):
            raise ValueError(
                f"blocks of shape {blocks.shape} {blocks.dtype}: "
                f"expected [M, {', '.join(map(str, self.format.shape))}] {self.format.item_dtype}"
            )
        count = blocks.shape[0]
        if not 1 <= count <= self.insert_blocks:
            raise ValueError(f"{count} blocks in one insert: expected 1 … {self.insert_blocks}")
        if not 0 <= first_block <= self._num_blocks - count:
            raise ValueError(
                f"blocks {first_block} … {first_block + count - 1}: a slot has {self._num_blocks}"
            )
        first = 0
        with self._guard():
            for run in binary_runs(count, self.insert_blocks):
                part = np.ascontiguousarray(blocks[first : first + run]).view(self._storage)
                self._cache = compiled.insert[run](
                    self._cache, part, np.int32(slot), np.int32(first_block + first)
                )
                first += run
            jax.block_until_ready(
                self._cache
            )  # the device reads `blocks` in place; now the caller may reuse them
        self._held[slot, first_block : first_block + count] = True

    def remember(self, slot: int, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        """See the contract. Raises ValueError for a slot or token out of range."""
        self._check_slot(slot)
        if any(len(ids) and not 0 <= min(ids) <= max(ids) < self._cfg.vocab_size for ids in (prompt, drawn)):
            raise ValueError(f"slot {slot}: token ids are 0 … {self._cfg.vocab_size - 1}")
        with self._guard():
            self._drawing.remember(slot, prompt, drawn)

    def generate(self, rows: BatchRows) -> DrawnTokens:
        """See the contract. Raises ValueError for rows out of range, or a position that does not follow held KV."""
        compiled = self._compiled
        self._check_rows(rows)
        slots = np.flatnonzero(rows.active)
        if not slots.size:
            return DrawnTokens(np.zeros(self.num_slots, np.int32), np.zeros(self.num_slots, np.float32))
        batch = next(size for size in self._batches if size > slots[-1])
        active = rows.active[:batch]
        positions = np.where(active, rows.positions[:batch], 0)
        with self._guard():
            x, rotation = compiled.embed[batch](
                self._embedding, np.where(active, rows.tokens[:batch], 0), positions
            )
            for group, layers in enumerate(self._layers):
                x, self._cache[group] = compiled.group[batch](
                    layers, x, rotation, self._cache[group], positions, active
                )
            x = self._devices.on_first(x)
            drawn = self._drawing.finish(self._drawing.start(x, rows.draw, rows.active))
        self._held[slots, rows.positions[slots] // self._cfg.block_tokens] = True
        return self._all_slots(drawn)

    def extract(self, slot: int, block: int) -> np.ndarray:
        """See the contract. Raises ValueError for a slot or block out of range, or one that holds nothing."""
        self._check_slot(slot)
        if not 0 <= block < self._num_blocks or not self._held[slot, block]:
            raise ValueError(f"block {block} of slot {slot}: nothing was written there")
        with self._guard():
            taken = self._compiled.extract(self._cache, np.int32(slot), np.int32(block))
            return np.asarray(taken).view(self.format.item_dtype)

    def _all_slots(self, drawn: DrawnTokens) -> DrawnTokens:
        """With zeros for the slots that did not run."""
        missing = self.num_slots - len(drawn.tokens)
        columns = (column for column in drawn if column is not None)
        return DrawnTokens(*(np.pad(c, ((0, missing), *((0, 0) for _ in c.shape[1:]))) for c in columns))

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} of {self.num_slots}")

    def _check_rows(self, rows: BatchRows) -> None:
        draws.check(rows.draw, self.num_slots)
        for name, column, dtype in zip(rows._fields, rows[:-1], _ROW_DTYPES, strict=False):
            if column.shape != (self.num_slots,) or column.dtype != dtype:
                raise ValueError(
                    f"rows.{name}: {column.shape} {column.dtype}, expected ({self.num_slots},) {dtype}"
                )
        slots = np.flatnonzero(rows.active)
        positions, tokens = rows.positions[slots], rows.tokens[slots]
        if np.any((positions < 0) | (positions >= self.max_tokens)):
            raise ValueError(
                f"positions {positions.tolist()} of slots {slots.tolist()}: 0 … {self.max_tokens - 1}"
            )
        if np.any((tokens < 0) | (tokens >= self._cfg.vocab_size)):
            raise ValueError(
                f"tokens {tokens.tolist()} of slots {slots.tolist()}: there are {self._cfg.vocab_size}"
            )
        held = self.format.block_tokens * np.logical_and.accumulate(self._held[slots], axis=1).sum(axis=1)
        if np.any(positions > held):
            raise ValueError(
                f"positions {positions.tolist()} of slots {slots.tolist()}, which hold {held.tolist()} tokens"
            )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """A failed step may have consumed its donated cache: start again from an empty one, so that serving
        goes on.

        All slots lose what they held; `generate` refuses them until blocks are inserted again.
        """
        try:
            yield
        except Exception:
            self._reset()
            raise

    def _reset(self) -> None:
        shape = cache.pages_shape(self._cfg, self.num_slots, self._num_pages)
        layers = range(self._cfg.layers_per_group)
        self._cache = [
            [self._devices.empty_pages(shape, self._storage) for _ in layers]
            for _ in range(self.format.num_groups)
        ]
        self._drawing.reset()
        self._held = np.zeros((self.num_slots, self._num_blocks), np.bool_)  # blocks that were ever written

    def _compile(self) -> _Programs:
        cfg, zero, where = self._cfg, np.int32(0), self._devices.of_whole
        embed, group = {}, {}
        group_step = self._devices.group_step(cfg, self._platform)

        def embed_step(
            table: jax.Array, tokens: jax.Array, positions: jax.Array
        ) -> tuple[jax.Array, Rotation]:
            return llama.embed(table, tokens), rope.rotation(cfg, positions)

        for batch in self._batches:
            x = jax.ShapeDtypeStruct((batch, cfg.d_model), jnp.float32, sharding=where)
            ids, active = np.zeros(batch, np.int32), np.zeros(batch, np.bool_)
            angles = jax.ShapeDtypeStruct((batch, 1, cfg.head_dim // 2), jnp.float32, sharding=where)
            rotation = Rotation(angles, angles)  # pyright: ignore[reportArgumentType]
            embed[batch] = program(embed_step, self._embedding, ids, ids, out_shardings=where)
            group[batch] = program(
                group_step, self._layers[0], x, rotation, self._cache[0], ids, active, donate=[3]
            )
        insert = {}
        for run in buckets(1, self.insert_blocks):
            blocks = jax.ShapeDtypeStruct((run, *self.format.shape), self._storage)
            insert[run] = program(self._devices.insert_step(), self._cache, blocks, zero, zero, donate=[0])
        extract = program(self._devices.extract_step(), self._cache, zero, zero)
        return _Programs(embed, group, insert, extract)

    @property
    def _compiled(self) -> _Programs:
        if self._programs is None:
            raise RuntimeError("decode engine: call warm_up() before the first use")
        return self._programs


def _checked(mesh: MeshShape | None, cfg: LlamaConfig, devices: Sequence[Any] | None) -> Mesh | None:
    if mesh is None:
        return None
    if mesh.num_devices != mesh.tensor:
        raise ValueError(f"mesh {mesh}: decode is shared by tensor alone; stages are for prefill")
    mesh.check(cfg)
    return mesh.make(devices)

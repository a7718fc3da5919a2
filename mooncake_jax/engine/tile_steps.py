"""The compiled steps of a prefill tile, and the weights that they read on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models import cache, llama, rope
from models.attention import StoredBlocks
from models.config import LlamaConfig
from models.platform import Platform
from models.rope import Rotation
from models.split import ByColumns, ByRows, Split, share_columns
from mooncake_jax.engine.compiles import program
from mooncake_jax.engine.mesh import EngineMesh


class _Programs(NamedTuple):
    """Dictionaries are by tile size, `insert` by number of blocks."""

    embed: dict[int, Callable[..., Any]]
    group: dict[int, Callable[..., Any]]
    last: dict[int, Callable[..., Any]]
    insert: dict[int, Callable[..., Any]]


class TileSteps:
    """One program per tile size and layer group serves all groups; `params` are `llama.prepare`d.

    Small tiles are split over the devices of `mesh` by columns, the others by rows (`models.split`). The weights
    for both lie in the same memory where the devices can read a host array in place.
    """

    def __init__(
        self,
        cfg: LlamaConfig,
        platform: Platform,
        mesh: EngineMesh,
        params: llama.Params,
        tiles: Sequence[int],
    ) -> None:
        n = mesh.num_devices
        self._cfg, self._platform, self._mesh = cfg, platform, mesh
        self._hows: dict[int, Split] = {
            tile: ByColumns(n) if tile <= platform.tile_tokens_by_columns else ByRows(n) for tile in tiles
        }
        self._orders = {tile: how.dealt(tile) for tile, how in self._hows.items()}
        self._embedding = mesh.put(params["embed"])
        table, size = llama.param_table(cfg)["layers"], cfg.layers_per_group
        layers = share_columns(table, params["layers"], n)
        groups = [layers[i : i + size] for i in range(0, cfg.num_layers, size)]
        self._share_specs = jax.tree.map(lambda param: mesh.spec(param.shared_axis), table[:size])
        self._layers: dict[type[Split], list[list[llama.Params]]] = {
            ByRows: [jax.tree.map(mesh.put, group) for group in groups]
        }
        if ByColumns in map(type, self._hows.values()):
            self._layers[ByColumns] = [jax.tree.map(mesh.put, group, self._share_specs) for group in groups]
        self._programs: _Programs | None = None

    @property
    def is_compiled(self) -> bool:
        return self._programs is not None

    @property
    def run_pages(self) -> list[int]:
        """How many pages attention reads at a time, one entry per tile size."""
        return [
            self._platform.prefill_pages(self._cfg, how.run_rows(tile))
            if isinstance(how, ByRows)
            else self._platform.tail_pages(self._cfg)
            for tile, how in self._hows.items()
        ]

    def takes_stored(self, tile: int) -> bool:
        """Whether a tile of this size attends over blocks where a store keeps them."""
        return isinstance(self._hows[tile], ByColumns)

    def compile(
        self,
        pages: list[jax.Array],
        stored: StoredBlocks | None,
        insert_runs: Sequence[int],
        block_shape: tuple[int, ...],
    ) -> None:
        """For a group's cache like `pages`, blocks of a store like `stored`, and for insertions of so many blocks
        `[l, K, 2, Z, H]` at a time."""
        cfg, mesh, whole, where = self._cfg, self._mesh, EngineMesh.WHOLE, self._mesh.numbers(0, 0, 0)
        embed, group, last, insert = {}, {}, {}, {}
        for tile, how in self._hows.items():
            by_rows = isinstance(how, ByRows)
            placed, spec = (mesh.parts, EngineMesh.PARTS) if by_rows else (mesh.whole, whole)
            x = jax.ShapeDtypeStruct((tile, cfg.d_model), jnp.float32, sharding=placed)
            tokens = jax.ShapeDtypeStruct((tile,), jnp.int32, sharding=placed)
            embed[tile] = program(
                mesh.side_by_side(self._embed_step(how), (whole, spec, whole), (spec, spec)),
                self._embedding,
                tokens,
                where,
            )
            angles = jax.ShapeDtypeStruct((tile, 1, cfg.head_dim // 2), jnp.float32, sharding=placed)
            rotation = Rotation(angles, angles)  # pyright: ignore[reportArgumentType]
            layers = whole if by_rows else self._share_specs
            more = [] if by_rows else [stored]
            step = mesh.side_by_side(
                self._group_step(how),
                (layers, spec, spec, whole, whole, *[whole] * len(more)),
                (spec, whole, whole),
            )
            group[tile] = program(
                step, self._layers[type(how)][0], x, rotation, pages, where, *more, donate=[3]
            )
            last[tile] = program(
                lambda x, row: lax.dynamic_slice_in_dim(x, row[0], 1),
                x,
                mesh.numbers(0),
                out_shardings=mesh.whole,
            )
        insert_step = mesh.side_by_side(
            lambda pages, blocks, where: cache.insert_blocks(pages, blocks, where[0], where[1]),
            (whole, whole, whole),
            whole,
        )
        for run in insert_runs:
            blocks = jax.ShapeDtypeStruct((run, *block_shape), pages[0].dtype, sharding=mesh.whole)
            insert[run] = program(insert_step, pages, blocks, mesh.numbers(0, 0), donate=[0])
        self._programs = _Programs(embed, group, last, insert)

    def embed(self, tokens: np.ndarray, where: jax.Array) -> tuple[jax.Array, Rotation]:
        """Tokens `[≤ T]` → the tile's `x` `[T, D]` and rotation, padded to the next size and dealt to the devices.

        `where`: slot, start, number of valid rows.
        """
        tile = next(size for size in self._hows if size >= tokens.size)
        padded = np.zeros(tile, np.int32)
        padded[: tokens.size] = tokens
        spec = EngineMesh.PARTS if isinstance(self._hows[tile], ByRows) else EngineMesh.WHOLE
        dealt = self._mesh.put(padded[self._orders[tile]], spec)
        return self._compiled.embed[tile](self._embedding, dealt, where)

    def group(
        self,
        group: int,
        x: jax.Array,
        rotation: Rotation,
        pages: list[jax.Array],
        where: jax.Array,
        stored: StoredBlocks | None,
    ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        """See `llama.prefill_group`; `pages` are donated. `where` is as `embed` takes it. `stored` counts where the
        tile `takes_stored`."""
        tile = x.shape[0]
        layers = self._layers[type(self._hows[tile])][group]
        more = [stored] if self.takes_stored(tile) else []
        return self._compiled.group[tile](layers, x, rotation, pages, where, *more)

    def insert(self, pages: list[jax.Array], blocks: np.ndarray, where: jax.Array) -> list[jax.Array]:
        """Put blocks `[M, l, K, 2, Z, H]` into a group's cache, donated. `where`: slot, first page.

        `blocks` are read in place, until the step is done.
        """
        return self._compiled.insert[len(blocks)](pages, self._mesh.put(blocks), where)

    def in_order(self, x: jax.Array) -> np.ndarray:
        """A tile's activations `[T, D]` as its tokens follow one another."""
        whole = np.empty(x.shape, np.float32)
        whole[self._orders[x.shape[0]]] = np.asarray(x)
        return whole

    def row(self, x: jax.Array, offset: int) -> jax.Array:
        """The activations of one token of a tile, `[1, D]`, on the first device."""
        tile = x.shape[0]
        place = int(np.flatnonzero(self._orders[tile] == offset)[0])
        return self._compiled.last[tile](x, self._mesh.numbers(place)).addressable_data(0)

    def _embed_step(self, how: Split) -> Callable[..., Any]:
        def step(table: jax.Array, tokens: jax.Array, where: jax.Array) -> tuple[jax.Array, Rotation]:
            positions = where[1] + how.offsets(tokens.shape[0])
            return llama.embed(table, tokens), rope.rotation(self._cfg, positions)

        return step

    def _group_step(self, how: Split) -> Callable[..., Any]:
        def step(
            layers: Any,
            x: jax.Array,
            rotation: Rotation,
            pages: Any,
            where: jax.Array,
            stored: StoredBlocks | None = None,
        ) -> Any:
            slot, start, num_valid = where
            return llama.prefill_group(
                self._cfg, self._platform, how, layers, x, rotation, pages, slot, start, num_valid, stored
            )

        return step

    @property
    def _compiled(self) -> _Programs:
        if self._programs is None:
            raise RuntimeError("prefill engine: call warm_up() before the first use")
        return self._programs

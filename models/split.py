"""How a step is split over devices that compute side by side, inside a `shard_map`.

`ByRows` (sequence parallelism), for tiles of many rows: each device takes rows, and has all weights. `ByColumns`, for
few rows (the last tokens of a cached prompt), where reading weights and keys is what costs: each device takes a share of
the large weights (`models.llama.Param.shared_axis`) and of the keys. Either way each has a whole cache. `ByHeads` (tensor
parallelism): each device has some heads, their share of the cache and of the weights, and computes them for all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.config import LlamaConfig

AXIS = "devices"  # the mesh axis of ByRows and ByColumns
TENSOR = "tensor"  # the mesh axis of ByHeads


@dataclass(frozen=True)
class ByRows:
    """Causal attention makes later rows dearer, so a tile is cut into 2n chunks and device d of n takes chunks d and
    2n-1-d: every device has the same work. New keys and values cross, once a layer."""

    num_devices: int

    def own(self, cfg: LlamaConfig) -> LlamaConfig:
        """The heads and widths that one device computes."""
        return cfg

    @property
    def shares(self) -> int:
        """Into how many shares the columns of a weight are cut that are gathered after the product; a device has one."""
        return 1

    @property
    def order(self) -> int:
        """The number of shares in whose order the rows of a weight lie (`share_columns`)."""
        return self.num_devices

    def dealt(self, tile: int) -> np.ndarray:
        """Which offset of the tile each row of `x` holds, all devices' one after the other, `[T]`.

        Raises ValueError for a tile that does not cut into 2n equal chunks.
        """
        n = self.num_devices
        if n == 1:
            return np.arange(tile, dtype=np.int32)
        if tile % (2 * n):
            raise ValueError(f"a tile of {tile} tokens does not cut into {2 * n} equal chunks")
        chunks = np.arange(tile, dtype=np.int32).reshape(2 * n, -1)
        return np.concatenate([chunks[chunk] for d in range(n) for chunk in (d, 2 * n - 1 - d)])

    def run_rows(self, tile: int) -> int:
        """How many of the rows whose attention a device computes follow one another."""
        return tile if self.num_devices == 1 else tile // (2 * self.num_devices)

    def firsts(self, num_rows: int) -> list[jax.Array]:
        """Offsets in the tile at which the runs of these rows begin. `num_rows`: of this device's `x`."""
        if self.num_devices == 1:
            return [jnp.zeros((), jnp.int32)]
        device, chunk = lax.axis_index(AXIS).astype(jnp.int32), num_rows // 2
        return [device * chunk, (2 * self.num_devices - 1 - device) * chunk]

    def offsets(self, num_rows: int) -> jax.Array:
        """Which offset of the tile each row of this device's `x` holds."""
        firsts = self.firsts(num_rows)
        run = jnp.arange(num_rows // len(firsts), dtype=jnp.int32)
        return jnp.concatenate([first + run for first in firsts])

    def gather_tile(self, rows: jax.Array) -> jax.Array:
        """Rows as those of `x` → the tile `[T, …]` in the order of the prompt, on every device."""
        n = self.num_devices
        if n == 1:
            return rows
        chunks = lax.all_gather(rows, AXIS).reshape(2 * n, rows.shape[0] // 2, *rows.shape[1:])
        ahead = [2 * d for d in range(n)]
        return jnp.concatenate([chunks[i] for i in ahead + [i + 1 for i in reversed(ahead)]])

    def total(self, name: str, product: jax.Array, wire: Any) -> jax.Array:
        """What the projection `name` ("out" or "down") gives rows as those of `x`, `[rows, D]` float32, from this device's
        part of it. `wire`: the dtype in which parts that are to be added up cross."""
        return product


@dataclass(frozen=True)
class ByColumns:
    """`x` is the whole tile on every device. Meanings are those of `ByRows`."""

    num_devices: int

    def own(self, cfg: LlamaConfig) -> LlamaConfig:
        return cfg

    @property
    def shares(self) -> int:
        return self.num_devices

    @property
    def order(self) -> int:
        return 1  # within a share

    def dealt(self, tile: int) -> np.ndarray:
        return np.arange(tile, dtype=np.int32)

    def offsets(self, num_rows: int) -> jax.Array:
        return jnp.arange(num_rows, dtype=jnp.int32)

    def gather_tile(self, rows: jax.Array) -> jax.Array:
        return rows

    def total(self, name: str, product: jax.Array, wire: Any) -> jax.Array:
        return lax.psum(product, AXIS) if name == "down" and self.num_devices > 1 else product


@dataclass(frozen=True)
class ByHeads:
    """`x` is the whole tile on every device of the axis `TENSOR`, and everything between two residuals is a device's
    own: it runs a model with fewer heads and a narrower MLP, whose outputs are added up, twice a layer."""

    num_devices: int

    def own(self, cfg: LlamaConfig) -> LlamaConfig:
        """Raises ValueError naming what does not divide."""
        n = self.num_devices
        for what, count in (("KV heads", cfg.num_kv_heads), ("columns of the MLP", cfg.d_ff)):
            if count % n:
                raise ValueError(f"{count} {what} do not divide over tensor:{n}")
        return dataclasses.replace(
            cfg, num_heads=cfg.num_heads // n, num_kv_heads=cfg.num_kv_heads // n, d_ff=cfg.d_ff // n
        )

    @property
    def shares(self) -> int:
        return 1

    @property
    def order(self) -> int:
        return 1

    def dealt(self, tile: int) -> np.ndarray:
        return np.arange(tile, dtype=np.int32)

    def run_rows(self, tile: int) -> int:
        return tile

    def firsts(self, num_rows: int) -> list[jax.Array]:
        return [jnp.zeros((), jnp.int32)]

    def offsets(self, num_rows: int) -> jax.Array:
        return jnp.arange(num_rows, dtype=jnp.int32)

    def gather_tile(self, rows: jax.Array) -> jax.Array:
        return rows

    def total(self, name: str, product: jax.Array, wire: Any) -> jax.Array:
        if self.num_devices == 1:
            return product
        return lax.psum(product.astype(wire), TENSOR).astype(jnp.float32)


Split = ByRows | ByColumns | ByHeads


def add_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`[T, out]` float32 plus `[out]`."""
    return product if bias is None else product + bias.astype(jnp.float32)[None]


def gather_columns(x: jax.Array, shares: int) -> jax.Array:
    """Every device's output columns `[T, out/n]` → `[T, out]` on every device."""
    return x if shares == 1 else lax.all_gather(x, AXIS, axis=1, tiled=True)


def fitting_devices(most: int, tiles: Sequence[int], table: Any) -> int:
    """The most devices, `most` or a half, quarter … of it, over which all `tiles` and all shared parameters of `table`
    (`models.llama.Param`s) cut."""
    shared = [param for param in jax.tree.leaves(table) if param.shared_axis is not None]
    widths = {param.shape[param.shared_axis] // param.fused for param in shared}
    while most > 1 and (any(tile % (2 * most) for tile in tiles) or any(width % most for width in widths)):
        most //= 2
    return most


def share_columns(table: Any, params: Any, num_devices: int) -> Any:
    """Host `params` in the order that shares need: equal runs along the shared axis, one per device. Where several
    matrices are fused, a device's share of each stands beside those of the others.

    `table` has their `models.llama.Param`s. Raises ValueError for one that does not cut into equal shares.
    """

    def share(param: Any, array: np.ndarray) -> np.ndarray:
        axis = param.shared_axis
        if axis is None or num_devices == 1:
            return array
        if array.shape[axis] % (param.fused * num_devices):
            parts = f"{param.fused} times {num_devices}" if param.fused > 1 else str(num_devices)
            raise ValueError(f"a parameter of shape {array.shape} does not cut into {parts} equal shares")
        if param.fused == 1:
            return array
        cut = np.asarray(array).reshape(param.fused, num_devices, -1, *array.shape[1:])
        return np.ascontiguousarray(cut.swapaxes(0, 1)).reshape(array.shape)

    return jax.tree.map(share, table, params)

"""How a step is split over devices that compute side by side, inside a `shard_map` over `AXIS`.

Many rows (a prefill tile): each device takes rows. Causal attention makes later rows dearer, so a tile is cut
into 2n chunks and device d of n takes chunks d and 2n-1-d: every device has the same work. Weights are whole on
every device, and only new keys and values cross, once a layer.

Few rows (the last tokens of a cached prompt): reading the weights is what costs, so each device takes a share of
every product's output columns, and its rows' attention; activations are whole on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "devices"  # the mesh axis


def fitting_devices(most: int, tiles: Sequence[int], params: Any) -> int:
    """The most devices, `most` or a half, quarter … of it, over which all `tiles` and all shared `params` cut."""
    widths = {
        leaf.shape[0] // (2 if path[-1].key.startswith("gate_up") else 1)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if is_shared(path)
    }
    while most > 1 and (any(tile % (2 * most) for tile in tiles) or any(width % most for width in widths)):
        most //= 2
    return most


def dealt(tile: int, num_devices: int) -> np.ndarray:
    """Which offset of the tile each row holds once dealt, `[T]`: device d has rows d·T/n … of this order.

    Raises ValueError for a tile that does not cut into 2n equal chunks.
    """
    if num_devices == 1:
        return np.arange(tile, dtype=np.int32)
    if tile % (2 * num_devices):
        raise ValueError(f"a tile of {tile} tokens does not cut into {2 * num_devices} equal chunks")
    chunks = np.arange(tile, dtype=np.int32).reshape(2 * num_devices, -1)
    return np.concatenate(
        [chunks[chunk] for d in range(num_devices) for chunk in (d, 2 * num_devices - 1 - d)]
    )


def first_offsets(num_rows: int, num_devices: int) -> list[jax.Array]:
    """Offsets in the tile at which this device's chunks begin; its `num_rows` rows are these chunks, in order."""
    if num_devices == 1:
        return [jnp.zeros((), jnp.int32)]
    device, chunk = lax.axis_index(AXIS).astype(jnp.int32), num_rows // 2
    return [device * chunk, (2 * num_devices - 1 - device) * chunk]


def gather_rows(x: jax.Array, num_devices: int) -> jax.Array:
    """Every device's dealt rows `[T/n, …]` → the tile `[T, …]` in the order of the prompt, on every device."""
    if num_devices == 1:
        return x
    chunks = lax.all_gather(x, AXIS).reshape(2 * num_devices, x.shape[0] // 2, *x.shape[1:])
    ahead = [2 * d for d in range(num_devices)]
    return jnp.concatenate([chunks[i] for i in ahead + [i + 1 for i in reversed(ahead)]])


def gather_columns(x: jax.Array, num_devices: int) -> jax.Array:
    """Every device's output columns `[T, out/n]` → `[T, out]` on every device."""
    return x if num_devices == 1 else lax.all_gather(x, AXIS, axis=1, tiled=True)


def is_shared(path: tuple[Any, ...]) -> bool:
    """Whether a layer's parameter at this tree path has output columns (its rows) to share: all but norms have."""
    return not path[-1].key.endswith("_norm")


def share_columns(layers: Any, num_devices: int) -> Any:
    """Host layers in the order that shares need: row r of a weight or bias goes to device r // (rows/n) as it is, but
    `gate_up` is gate, up of device 0, gate, up of device 1, …

    Raises ValueError for a weight whose rows do not cut into equal shares.
    """
    if num_devices == 1:
        return layers

    def share(path: tuple[Any, ...], weight: np.ndarray) -> np.ndarray:
        if not is_shared(path):
            return weight
        name = path[-1].key
        parts = 2 * num_devices if name.startswith("gate_up") else num_devices
        if weight.shape[0] % parts:
            raise ValueError(f"{name}: {weight.shape[0]} rows do not cut into {num_devices} equal shares")
        if parts == num_devices:
            return weight
        cut = np.asarray(weight).reshape(2, num_devices, -1, *weight.shape[1:])
        return np.ascontiguousarray(cut.swapaxes(0, 1)).reshape(weight.shape)

    return jax.tree_util.tree_map_with_path(share, layers)

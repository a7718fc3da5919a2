"""How the rows of a prefill tile are dealt to devices that compute side by side.

Causal attention makes later rows dearer, so a tile is cut into 2n chunks and device d of n takes chunks d and
2n-1-d: every device has the same work. Weights and cache are whole on every device; only new keys and values
cross, once a layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "rows"  # the mesh axis


def dealt(tile: int, num_devices: int) -> np.ndarray:
    """Which offset of the tile each row holds once dealt, `[T]`: device d has rows d·T/n … of this order.

    Raises ValueError for a tile that does not cut into 2n equal chunks.
    """
    if num_devices == 1:
        return np.arange(tile, dtype=np.int32)
    if tile % (2 * num_devices):
        raise ValueError(f"a tile of {tile} tokens does not cut into {2 * num_devices} equal chunks")
    chunks = np.arange(tile, dtype=np.int32).reshape(2 * num_devices, -1)
    return np.concatenate([chunks[chunk] for d in range(num_devices) for chunk in (d, 2 * num_devices - 1 - d)])


def first_offsets(num_rows: int, num_devices: int) -> list[jax.Array]:
    """Offsets in the tile at which this device's chunks begin; its `num_rows` rows are these chunks, in order."""
    if num_devices == 1:
        return [jnp.zeros((), jnp.int32)]
    device, chunk = lax.axis_index(AXIS).astype(jnp.int32), num_rows // 2
    return [device * chunk, (2 * num_devices - 1 - device) * chunk]


def gather(x: jax.Array, num_devices: int) -> jax.Array:
    """Every device's rows `[T/n, …]` → the whole tile `[T, …]` in the order of the prompt, on every device."""
    if num_devices == 1:
        return x
    chunks = lax.all_gather(x, AXIS).reshape(2 * num_devices, x.shape[0] // 2, *x.shape[1:])
    ahead = [2 * d for d in range(num_devices)]
    return jnp.concatenate([chunks[i] for i in ahead + [i + 1 for i in reversed(ahead)]])

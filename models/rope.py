"""Rotary position embedding, rotate-half form: dimension i turns together with dimension i + H/2."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import LlamaConfig


class Rotation(NamedTuple):
    """Of each token's queries and keys, `[T, 1, H/2]` each, float32."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(cfg: LlamaConfig) -> np.ndarray:
    """Radians per position of each rotated pair, `[H/2]` float32, after the configuration's scaling."""
    exponents = np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim
    frequencies = cfg.rope_theta**-exponents
    scaling = cfg.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    # full turns within the original context
    turns = scaling.original_max_position * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequencies * (keep + (1.0 - keep) / scaling.factor)).astype(np.float32)


def rotation(cfg: LlamaConfig, positions: jax.Array) -> Rotation:
    """For tokens at `positions` `[T]`.

    Better in a program of its own than in the one that rotates: there XLA:CPU takes sines anew for every head and layer.
    """
    angles = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies(cfg)[None, None, :]
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Queries or keys `x` `[T, heads, H]` (float32), turned."""
    cos, sin = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

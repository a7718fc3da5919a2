"""Rotary position embedding, rotate-half form: dimension i turns together with dimension i + H/2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from models.config import LlamaConfig


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


def rotation(cfg: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for `positions` `[T]`, `[T, 1, H/2]` each, to be applied to `[T, heads, H]`."""
    angles = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies(cfg)[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply a `rotation` to queries or keys `x` `[T, heads, H]` (float32)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

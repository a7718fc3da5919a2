"""Elementwise functions that are exact to bfloat16 and no further, in few vector instructions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_LOG2_E = 1.4426950408889634
_CUBIC = (
    0.077907164,
    0.226233194,
    0.695777096,
    0.999927827,
)  # 2**f for 0 ≤ f < 1, least squares of the relative error


def exp2(x: jax.Array) -> jax.Array:
    """2**x of float32 x from -126 to 126, within 2e-4 of it: x is split into n + f, 0 ≤ f < 1, with a cubic for 2**f."""
    n = jnp.floor(x)
    f = x - n
    power = ((_CUBIC[0] * f + _CUBIC[1]) * f + _CUBIC[2]) * f + _CUBIC[3]
    bits = lax.bitcast_convert_type(power, jnp.int32) + (n.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def silu(x: jax.Array) -> jax.Array:
    """x times the logistic function of x, of float32 x above -1e30."""
    return x / (1.0 + exp2(jnp.clip(x * -_LOG2_E, -126.0, 126.0)))


def to_bfloat16(x: jax.Array) -> jax.Array:
    """The nearest bfloat16 of finite float32 x; a tie goes away from zero."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(((bits + 0x8000) >> 16).astype(jnp.uint16), jnp.bfloat16)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, short
from models.platform import ACCELERATOR, CPU

RNG = np.random.default_rng(0)
NEAR = 2**-8  # half a unit in the last place of a bfloat16, at most


@pytest.mark.parametrize("platform", [CPU, ACCELERATOR])
def test_attention_weights_are_exact_to_bfloat16(platform):
    x = -np.abs(RNG.normal(size=4096).astype(np.float32)) * 20
    x[:4] = [0.0, -1.0, -126.0, -1e30]
    weights = jax.jit(lambda x: attention.exp2_weights(x, jnp.bfloat16, platform))
    expected = np.exp2(np.maximum(x, -126.0).astype(np.float64))
    np.testing.assert_allclose(np.asarray(weights(x)).astype(np.float64), expected, rtol=NEAR, atol=2e-38)


def test_silu_is_exact_to_bfloat16_from_end_to_end():
    x = np.concatenate([RNG.normal(size=4096) * 10, [0.0, 1e4, -1e4, 80.0, -80.0, 3e38]]).astype(np.float32)
    got = np.asarray(jax.jit(lambda x: short.to_bfloat16(short.silu(x)))(x)).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(got, expected, rtol=1.1 * NEAR, atol=1e-30)


def test_rounding_is_to_the_nearest():
    x = RNG.normal(size=4096).astype(np.float32)
    x[:3] = [0.0, -0.0, 1.0]
    got = np.asarray(jax.jit(short.to_bfloat16)(x)).astype(np.float64)
    np.testing.assert_allclose(got, x, rtol=NEAR)
    np.testing.assert_array_equal(got, np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).astype(np.float64))

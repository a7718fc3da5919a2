"""Strict JAX for the model's tests: no silent promotion of dtypes or ranks."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield

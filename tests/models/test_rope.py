import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from models import rope
from models.config import RopeScaling, preset

CFG = preset("llama3-8b")


def test_unscaled_frequencies_fall_from_one_to_theta():
    frequencies = rope.inverse_frequencies(dataclasses.replace(CFG, rope_scaling=None))
    assert frequencies[0] == 1.0
    np.testing.assert_allclose(frequencies[32], CFG.rope_theta ** (-64 / 128), rtol=1e-6)


def test_linear_scaling_divides_all():
    plain = rope.inverse_frequencies(dataclasses.replace(CFG, rope_scaling=None))
    scaled = rope.inverse_frequencies(
        dataclasses.replace(CFG, rope_scaling=RopeScaling("linear", factor=4.0))
    )
    np.testing.assert_allclose(scaled, plain / 4.0, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_mixes_between():
    plain = rope.inverse_frequencies(dataclasses.replace(CFG, rope_scaling=None)).astype(np.float64)
    scaled = rope.inverse_frequencies(CFG)
    wavelengths = 2 * math.pi / plain
    for i, wavelength in enumerate(wavelengths):  # as published: low 1, high 4, factor 8, original 8192
        if wavelength < 8192 / 4.0:
            expected = plain[i]
        elif wavelength > 8192 / 1.0:
            expected = plain[i] / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * plain[i] / 8.0 + smooth * plain[i]
        np.testing.assert_allclose(scaled[i], expected, rtol=1e-6)
    assert np.sum(wavelengths < 2048) > 5
    assert np.sum((wavelengths > 2048) & (wavelengths < 8192)) > 0


def test_scores_depend_on_distance_only():
    cfg = preset("tiny")
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, cfg.head_dim)) for i in (0, 1))

    def score(query_at, key_at):
        a = rope.rotate(q, rope.rotation(cfg, jnp.array([query_at])))
        b = rope.rotate(k, rope.rotation(cfg, jnp.array([key_at])))
        return float((a * b).sum())

    assert math.isclose(score(7, 3), score(107, 103), abs_tol=1e-4)
    assert not math.isclose(score(7, 3), score(7, 4), abs_tol=1e-3)

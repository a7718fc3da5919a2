"""From a request's `Sampling` to its row of `models.draw.Draw`."""

from __future__ import annotations

from models import draw as draws
from models.draw import Draw
from mooncake_jax.request import Sampling


def fill(draw: Draw, row: int, sampling: Sampling) -> None:
    """Everything but the step, which changes with every token."""
    draw.temperature[row], draw.top_k[row] = sampling.temperature, sampling.top_k
    draw.top_p[row], draw.seed[row] = sampling.top_p, sampling.seed


def one_row(sampling: Sampling, step: int) -> Draw:
    """A batch of this row alone."""
    draw = draws.blank(1)
    fill(draw, 0, sampling)
    draw.step[0] = step
    return draw

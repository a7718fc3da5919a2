"""From a request's `Sampling` to its row of `models.draw.Draw`."""

from __future__ import annotations

from models import draw as draws
from models.draw import Draw
from mooncake_jax.request import Sampling

_COLDEST = 1e-5  # below this temperature, a row is greedy: float32 could not divide by it


def fill(draw: Draw, row: int, sampling: Sampling) -> None:
    """Everything but the step, which changes with every token."""
    draws.clear(draw, row)
    draw.temperature[row] = sampling.temperature if sampling.temperature >= _COLDEST else 0.0
    draw.seed[row] = sampling.seed
    draw.top_k[row], draw.top_p[row], draw.min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p
    draw.presence[row], draw.frequency[row] = sampling.presence_penalty, sampling.frequency_penalty
    draw.repetition[row], draw.num_top[row] = sampling.repetition_penalty, sampling.num_top
    for i, bias in enumerate(sampling.biases):
        draw.bias_tokens[row, i], draw.biases[row, i] = bias.token, bias.amount
        draw.bias_until[row, i] = draws.EVER if bias.until is None else bias.until


def one_row(sampling: Sampling, step: int) -> Draw:
    """A batch of this row alone."""
    draw = draws.blank(1)
    fill(draw, 0, sampling)
    draw.step[0] = step
    return draw

"""How the next token of each row is to be drawn: the columns that `models.sampling` reads. NumPy only, so that
whoever fills them needs no accelerator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_BIASES = 320  # tokens whose logits one row may change
MAX_TOP = 20  # most likely tokens that are told beside the drawn one
NO_TOKEN = 2**31 - 1  # fills unused places of `bias_tokens`: outside every vocabulary
EVER = 2**31 - 1  # a bias that does not end
FORBIDDEN = -1e30  # as a bias: never drawn; finite, so that no row can become NaN


class Draw(NamedTuple):
    """One entry per row, `[B]` each, but for the biases, `[B, MAX_BIASES]`."""

    temperature: np.ndarray  # float32; 0 is greedy
    top_k: np.ndarray  # int32; 0: no limit
    top_p: np.ndarray  # float32; 1: no limit
    min_p: np.ndarray  # float32; 0: no limit
    presence: np.ndarray  # float32, subtracted from logits of tokens that were drawn; 0: none
    frequency: np.ndarray  # float32, subtracted for every time they were
    repetition: (
        np.ndarray
    )  # float32, divides logits of tokens of prompt and answer (multiplies below 0); 1: none
    bias_tokens: np.ndarray  # int32
    biases: np.ndarray  # float32, added to their logits
    bias_until: np.ndarray  # int32: from this step on it is over
    num_top: np.ndarray  # int32: how many of the most likely tokens are to be told
    seed: np.ndarray  # uint32
    step: np.ndarray  # int32: index of the token to be drawn


_BLANK = Draw(
    temperature=np.asarray(0, np.float32),
    top_k=np.asarray(0, np.int32),
    top_p=np.asarray(1, np.float32),
    min_p=np.asarray(0, np.float32),
    presence=np.asarray(0, np.float32),
    frequency=np.asarray(0, np.float32),
    repetition=np.asarray(1, np.float32),
    bias_tokens=np.full(MAX_BIASES, NO_TOKEN, np.int32),
    biases=np.zeros(MAX_BIASES, np.float32),
    bias_until=np.full(MAX_BIASES, EVER, np.int32),
    num_top=np.asarray(0, np.int32),
    seed=np.asarray(0, np.uint32),
    step=np.asarray(0, np.int32),
)


def blank(num_rows: int) -> Draw:
    """Greedy rows, to be filled in."""
    return Draw(*(np.repeat(one[None], num_rows, axis=0) for one in _BLANK))


def clear(draw: Draw, row: int) -> None:
    """Make `row` greedy and plain again."""
    for column, one in zip(draw, _BLANK, strict=True):
        column[row] = one


def is_plain(draw: Draw, rows: np.ndarray) -> bool:
    """Whether all of `rows` (a mask) need no more than their most likely token and its log probability."""
    return not (
        np.any(draw.temperature[rows] > 0.0)
        or np.any(draw.num_top[rows] > 0)
        or np.any(draw.bias_tokens[rows, 0] != NO_TOKEN)
        or np.any((draw.presence[rows] != 0.0) | (draw.frequency[rows] != 0.0))
        or np.any(draw.repetition[rows] != 1.0)
    )


def check(draw: Draw, num_rows: int) -> None:
    """Raises ValueError, naming the column, where one has not the shape or type that programs are compiled for."""
    for name, column, one in zip(draw._fields, draw, _BLANK, strict=True):
        if column.shape != (num_rows, *one.shape) or column.dtype != one.dtype:
            raise ValueError(
                f"draw.{name}: {column.shape} {column.dtype}, expected {(num_rows, *one.shape)} {one.dtype}"
            )

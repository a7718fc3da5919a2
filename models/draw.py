"""How the next token of each row is to be drawn: the columns that `models.sampling` reads. NumPy only, so that
whoever fills them needs no accelerator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Draw(NamedTuple):
    """One entry per row, `[B]` each."""

    temperature: np.ndarray  # float32; 0 is greedy
    top_k: np.ndarray  # int32; 0: no limit
    top_p: np.ndarray  # float32
    seed: np.ndarray  # uint32
    step: np.ndarray  # int32: index of the token to be drawn


_BLANK = Draw(*map(np.asarray, (np.float32(0), np.int32(0), np.float32(1), np.uint32(0), np.int32(0))))


def blank(num_rows: int) -> Draw:
    """Rows that are greedy, to be filled in."""
    return Draw(*(np.repeat(one[None], num_rows, axis=0) for one in _BLANK))


def check(draw: Draw, num_rows: int) -> None:
    """Raises ValueError, naming the column, where one has not the shape or type that programs are compiled for."""
    for name, column, one in zip(draw._fields, draw, _BLANK, strict=True):
        if column.shape != (num_rows, *one.shape) or column.dtype != one.dtype:
            raise ValueError(
                f"draw.{name}: {column.shape} {column.dtype}, expected {(num_rows, *one.shape)} {one.dtype}"
            )

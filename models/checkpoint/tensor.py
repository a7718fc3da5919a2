"""A tensor in somebody's file, and what a format must offer to have it read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from models.checkpoint.errors import CheckpointError

_CHUNK_NBYTES = 16 << 20  # of a tensor that is converted, as float32: what a load needs beyond its result


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, by its header: `shape` in (out, in) order and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    nbytes: int


class TensorSource(Protocol):
    """An open checkpoint of one format."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def read_into(self, tensor: Tensor, out: np.ndarray) -> None:
        """Write the tensor's values into `out` (same shape, our dtype and row order)."""
        ...


def chunk_rows(row_values: int) -> int:
    """Rows of `row_values` values to convert at a time."""
    return max(1, _CHUNK_NBYTES // (4 * row_values))


def read_exactly(file: BinaryIO, array: np.ndarray, tensor: Tensor) -> None:
    """Fill a contiguous array from `file` where it stands; raises CheckpointError if the file ends first."""
    view = memoryview(array.reshape(-1).view(np.uint8).data)
    while view:
        count = file.readinto(view)  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise CheckpointError(f"{tensor.file}: ends in the middle of tensor {tensor.name}")
        view = view[count:]

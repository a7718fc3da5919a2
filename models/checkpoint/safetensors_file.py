"""Safetensors files, read with plain reads: bfloat16 bit for bit, no second copy mapped into memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from models.checkpoint.errors import CheckpointError
from models.checkpoint.tensor import Tensor, chunk_rows, read_exactly

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_NBYTES = 100_000_000


class SafetensorsSource:
    """The tensors of one or more safetensors files."""

    def __init__(self, paths: list[Path]):
        self.tensors: dict[str, Tensor] = {}
        for path in paths:
            for name, tensor in read_header(path).items():
                if name in self.tensors:
                    raise CheckpointError(f"{path}: tensor {name} is in {self.tensors[name].file} as well")
                self.tensors[name] = tensor

    def read_into(self, tensor: Tensor, out: np.ndarray) -> None:
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}; supported: {', '.join(DTYPES)}"
            )
        dtype = DTYPES[tensor.dtype]
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            if dtype == out.dtype:
                read_exactly(file, out, tensor)
                return
            step = chunk_rows(math.prod(tensor.shape[1:]))
            for start in range(0, tensor.shape[0], step):
                target = out[start : start + step]
                rows = np.empty(target.shape, dtype)
                read_exactly(file, rows, tensor)
                target[...] = rows


def read_header(path: Path) -> Mapping[str, Tensor]:
    """The tensors of one file, sizes and offsets checked; raises CheckpointError naming file and tensor."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_NBYTES):
                raise CheckpointError(f"{path}: truncated, or not a safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: broken header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: broken header: expected a JSON object")
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            start, stop = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            tensor = Tensor(name, shape, entry["dtype"], str(path), 8 + length + start, stop - start)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: tensor {name} has a broken header entry {entry!r}") from error
        if start < 0 or stop < start or min(shape, default=1) < 0:
            raise CheckpointError(f"{path}: tensor {name} has a broken header entry {entry!r}")
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at {tensor.offset + tensor.nbytes} of {size}"
            )
        dtype = DTYPES.get(tensor.dtype)
        if dtype is not None and math.prod(shape) * dtype.itemsize != tensor.nbytes:
            raise CheckpointError(f"{path}: tensor {name} {shape} {tensor.dtype} has {tensor.nbytes} bytes")
        tensors[name] = tensor
    return tensors

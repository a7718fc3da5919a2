"""GGUF files: metadata and tensor headers, every offset checked, and tensors decoded a few rows at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC
from gguf.constants import GGMLQuantizationType as QType
from gguf.constants import GGUFValueType as VType
from gguf.quants import dequantize

from models.checkpoint.errors import CheckpointError
from models.checkpoint.tensor import Tensor, chunk_rows, read_exactly

DECODED = (
    QType.F32,
    QType.F16,
    QType.BF16,
    QType.Q8_0,
    QType.Q4_0,
    QType.Q4_1,
    QType.Q5_0,
    QType.Q5_1,
    QType.Q4_K,
    QType.Q5_K,
    QType.Q6_K,
)
_MAX_ITEMS = 1 << 24
_MAX_STRING_NBYTES = 1 << 24
_SCALARS = {
    VType.UINT8: "B",
    VType.INT8: "b",
    VType.UINT16: "H",
    VType.INT16: "h",
    VType.UINT32: "I",
    VType.INT32: "i",
    VType.FLOAT32: "f",
    VType.BOOL: "?",
    VType.UINT64: "Q",
    VType.INT64: "q",
    VType.FLOAT64: "d",
}


class GGUFFile:
    """One GGUF file: `metadata` as plain Python values, `tensors` by name, shapes in (out, in) order."""

    def __init__(self, path: Path):
        """Raises CheckpointError for anything but a whole, little-endian GGUF of version 2 or 3."""
        self.path = path
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                self.metadata, self.tensors = _read_headers(path, _Reader(file), size)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        except CheckpointError:
            raise
        except (EOFError, struct.error, ValueError) as error:
            raise CheckpointError(f"{path}: broken header: {error}") from error

    def rows(self, tensor: Tensor) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, float32 values of some rows); raises for types we do not decode."""
        kind = QType[tensor.dtype]
        if kind not in DECODED:
            names = ", ".join(t.name for t in DECODED)
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} is {kind.name}; supported: {names}")
        num_rows = math.prod(tensor.shape[:-1])
        row_nbytes = tensor.nbytes // num_rows
        step = chunk_rows(tensor.shape[-1])
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            for start in range(0, num_rows, step):
                raw = np.empty((min(step, num_rows - start), row_nbytes), np.uint8)
                read_exactly(file, raw, tensor)
                yield start, dequantize(raw, kind)


class _Reader:
    """Takes typed values from a binary file, one after the other."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def take(self, code: str) -> Any:
        raw = self._bytes(struct.calcsize("<" + code))
        return struct.unpack("<" + code, raw)[0]

    def string(self) -> str:
        length = self.take("Q")
        if length > _MAX_STRING_NBYTES:
            raise ValueError(f"string of {length} bytes")
        return self._bytes(length).decode()

    def value(self, kind: VType) -> Any:
        if kind == VType.STRING:
            return self.string()
        if kind != VType.ARRAY:
            return self.take(_SCALARS[kind])
        item, count = VType(self.take("I")), self.take("Q")
        if count > _MAX_ITEMS:
            raise ValueError(f"array of {count} items")
        if item in _SCALARS:
            code = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack(code, self._bytes(struct.calcsize(code))))
        return [self.value(item) for _ in range(count)]

    def position(self) -> int:
        return self._file.tell()

    def _bytes(self, count: int) -> bytes:
        raw = self._file.read(count)
        if len(raw) != count:
            raise EOFError("the file ends inside its header")
        return raw


def _read_headers(path: Path, reader: _Reader, size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if reader.take("I") != GGUF_MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file")
    if (version := reader.take("I")) not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors, num_fields = reader.take("Q"), reader.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = reader.string()
        metadata[key] = reader.value(VType(reader.take("I")))
    heads = []
    for _ in range(num_tensors):
        name = reader.string()
        num_dims = reader.take("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        dims = [reader.take("Q") for _ in range(num_dims)]
        type_number, offset = reader.take("I"), reader.take("Q")
        try:
            heads.append((name, tuple(reversed(dims)), QType(type_number), offset))
        except ValueError:
            raise CheckpointError(f"{path}: tensor {name} is of type {type_number}: unknown") from None
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    base = -(-reader.position() // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in heads:
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block or min(shape) < 1:
            raise CheckpointError(f"{path}: tensor {name} {shape} does not divide into blocks of {kind.name}")
        tensor = Tensor(
            name, shape, kind.name, str(path), base + offset, math.prod(shape) // block * block_nbytes
        )
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at {tensor.offset + tensor.nbytes} of {size}"
            )
        tensors[name] = tensor
    return metadata, tensors

"""Memory as flat bytes: what callers hand in, by the buffer protocol or DLPack, becomes a view; nothing is copied."""

from __future__ import annotations

import numpy as np

_DLPACK_CPU = 1  # kDLCPU; pinned host memory is another kind, and not seen as a plain buffer


def byte_view(buffer: object) -> memoryview:
    """A flat uint8 view of C-contiguous memory of any format; read-only stays read-only.

    `buffer` has the buffer protocol, or `__dlpack__` and lies in host memory. Raises TypeError if it is neither,
    ValueError if it is not C-contiguous, on a device, or of a type that NumPy does not know.
    """
    try:
        view = memoryview(buffer)  # pyright: ignore[reportArgumentType]
    except TypeError:
        if not hasattr(buffer, "__dlpack__"):
            raise
        view = _from_dlpack(buffer).data
    if not view.c_contiguous:
        raise ValueError(
            f"buffer of shape {view.shape} and strides {view.strides} is not C-contiguous: copy it first"
        )
    if view.nbytes == 0:
        return memoryview(bytearray())
    if view.format == "B" and view.ndim == 1:
        return view
    return np.frombuffer(view, np.uint8).data


def _from_dlpack(buffer: object) -> np.ndarray:
    kind, index = buffer.__dlpack_device__()  # pyright: ignore[reportAttributeAccessIssue]
    if kind != _DLPACK_CPU:
        raise ValueError(
            f"buffer is on DLPack device {int(kind)}:{index}, not in host memory: copy it to a staging buffer first"
        )
    try:
        return np.from_dlpack(buffer)  # pyright: ignore[reportArgumentType]
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"NumPy cannot view the buffer: {error}; reinterpret it as uint8 first") from error


def address_of(view: memoryview) -> int:
    """The virtual address of a flat view; 0 if it is empty."""
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0] if len(view) else 0

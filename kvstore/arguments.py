"""What callers hand over, checked: keys and buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvstore.block import KEY_NBYTES
from kvstore.errors import InvalidError


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises InvalidError unless every key is `KEY_NBYTES` bytes."""
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_NBYTES:
            raise InvalidError(f"a block key is {KEY_NBYTES} bytes, got {key!r}")


def check_namespace(namespace: str) -> None:
    """Raises InvalidError unless it can be a namespace's name, or is empty."""
    if not re.fullmatch(r"[A-Za-z0-9._:-]{0,64}", namespace):
        raise InvalidError(
            f"namespace {namespace!r}: expected at most 64 letters, digits, dots, dashes, underscores, colons"
        )


def as_bytes(buffer: object, what: str, *, writable: bool = False) -> memoryview:
    """A C-contiguous buffer as flat bytes.

    Raises InvalidError for anything else, and for read-only ones to be written.
    """
    try:
        view = memoryview(buffer)  # pyright: ignore[reportArgumentType]
        flat = view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InvalidError(f"{what}: expected a C-contiguous buffer of plain numbers: {error}") from error
    if writable and view.readonly:
        raise InvalidError(f"{what} is read-only")
    return flat


def all_as_bytes(
    keys: Sequence[bytes], buffers: Sequence[object], *, writable: bool = False
) -> list[memoryview]:
    """One buffer per key, as flat bytes.

    Raises InvalidError as `as_bytes` does, and for another number of buffers.
    """
    if len(keys) != len(buffers):
        raise InvalidError(f"{len(keys)} keys but {len(buffers)} buffers")
    return [as_bytes(buffer, f"buffer {index}", writable=writable) for index, buffer in enumerate(buffers)]

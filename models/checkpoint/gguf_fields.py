"""The metadata of a GGUF file, typed."""

from __future__ import annotations

from typing import Any

from models.checkpoint.errors import CheckpointError
from models.checkpoint.gguf_file import GGUFFile


class GGUFFields:
    """Typed access to a file's metadata; a field that is missing or of another type is a CheckpointError."""

    def __init__(self, file: GGUFFile):
        self._file = file

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._file.metadata.get(name, default)
        if value is None:
            raise CheckpointError(f"{self._file.path}: metadata field {name} is missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self._file.path}: metadata field {name} is {value!r:.80}, not {kind.__name__}"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        if (value := self.get(name, int, default)) < 1:
            raise CheckpointError(f"{self._file.path}: metadata field {name} is {value}; it must be positive")
        return value

    def items(self, name: str, kind: type, default: list | None = None) -> list:
        """A list whose items are all of `kind`."""
        values = self.get(name, list, default)
        if not all(type(value) is kind for value in values):
            raise CheckpointError(
                f"{self._file.path}: metadata field {name} is not a list of {kind.__name__}"
            )
        return values

"""JSON files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.checkpoint.errors import CheckpointError


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """The object in `path`; empty for a missing file that is `optional`. Raises CheckpointError naming it."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value

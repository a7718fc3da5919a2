"""Large JSON bodies, written in pieces."""

from __future__ import annotations

from typing import Any

import msgspec

PIECE = 200  # items of a list that are encoded at a time


def encoded(value: Any) -> bytes:
    """What `msgspec.json.encode` gives, by many short calls: each keeps all other threads waiting while it runs."""
    if isinstance(value, dict):
        items = (msgspec.json.encode(key) + b":" + encoded(item) for key, item in value.items())
        return b"{" + b",".join(items) + b"}"
    if not isinstance(value, list):
        return msgspec.json.encode(value)
    if len(value) <= PIECE:
        return b"[" + b",".join(map(encoded, value)) + b"]"
    pieces = (msgspec.json.encode(value[i : i + PIECE])[1:-1] for i in range(0, len(value), PIECE))
    return b"[" + b",".join(pieces) + b"]"

"""How serving cuts a model that was just loaded, until somebody says otherwise (`dataclasses.replace`)."""

from __future__ import annotations

BLOCK_TOKENS = 32
_MIN_GROUPS = 4
_MAX_LAYERS = 10_000


def layers_per_group(num_layers: int) -> int:
    """Layers of one prefill program: the fewest equal groups, at least 4, so that KV streams early."""
    if not isinstance(num_layers, int) or not 0 < num_layers <= _MAX_LAYERS:
        raise ValueError(f"{num_layers!r} layers: expected 1 to {_MAX_LAYERS}")
    groups = next((g for g in range(_MIN_GROUPS, num_layers) if num_layers % g == 0), num_layers)
    return num_layers // groups

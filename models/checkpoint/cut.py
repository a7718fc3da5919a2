"""How serving cuts a model that was just loaded, until somebody says otherwise (`dataclasses.replace`)."""

from __future__ import annotations

BLOCK_TOKENS = 32
_MIN_GROUPS = 4


def layers_per_group(num_layers: int) -> int:
    """Layers of one prefill program: the fewest equal groups, at least 4, so that KV streams early."""
    groups = next((g for g in range(_MIN_GROUPS, num_layers) if num_layers % g == 0), num_layers)
    return num_layers // groups

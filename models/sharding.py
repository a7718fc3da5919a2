"""The one table from logical axes (see `models.llama.param_table`) to mesh axes."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import LlamaConfig
from models.llama import Param, Params, param_table

LOGICAL_TO_MESH: dict[str, str | None] = {
    "embed": None,
    "heads": "model",
    "mlp": "model",
    "vocab": "model",
}


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Mesh axes of an array with these logical axes; ValueError if two of them land on one mesh axis."""
    for axis in axes:
        if axis is not None and axis not in LOGICAL_TO_MESH:
            raise ValueError(f"logical axis {axis!r} of {axes}: expected one of {sorted(LOGICAL_TO_MESH)}")
    mesh_axes = tuple(None if axis is None else LOGICAL_TO_MESH[axis] for axis in axes)
    used = [axis for axis in mesh_axes if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {axes} land on mesh axes {mesh_axes}: one mesh axis is used twice")
    return PartitionSpec(*mesh_axes)


def param_shardings(cfg: LlamaConfig, mesh: Mesh) -> Params:
    """A NamedSharding for every parameter of `param_table`, for `mesh` (which has the axis 'model')."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, partition_spec(p.axes)),
        param_table(cfg),
        is_leaf=lambda leaf: isinstance(leaf, Param),
    )

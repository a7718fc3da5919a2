"""Meshes, and the one table from logical axes (see `models.llama.param_table`) to mesh axes.

A mesh has the axes `data` (slots), `stage` (X consecutive runs of layers) and `tensor` (heads and MLP columns).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from models import split
from models.config import LlamaConfig
from models.llama import Param, Params, param_table

DATA, STAGE, TENSOR = "data", "stage", split.TENSOR
LOGICAL_TO_MESH: dict[str, str | None] = {
    "slot": DATA,
    "layers": STAGE,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "token": None,  # rows of the embedding: every device looks tokens up by itself
    "embed": None,
}


@dataclass(frozen=True)
class MeshShape:
    """How many devices each axis has."""

    data: int = 1
    stage: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip((DATA, STAGE, TENSOR), self.sizes, strict=True):
            if size < 1:
                raise ValueError(f"mesh axis {axis} has {size} devices: at least 1")

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Of `stage:4,tensor:2`; axes that are not named have one device. ValueError says what was wrong."""
        sizes: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            axis, _, size = part.partition(":")
            if axis not in (DATA, STAGE, TENSOR) or axis in sizes or not size.isdecimal():
                raise ValueError(
                    f"mesh {text!r}: expected AXIS:SIZE,…, each of data, stage, tensor at most once"
                )
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.data, self.stage, self.tensor)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def check(self, cfg: LlamaConfig) -> None:
        """Raises ValueError with the reason when this model does not divide over such a mesh."""
        if cfg.num_layers % self.stage:
            raise ValueError(f"{cfg.num_layers} layers do not divide over stage:{self.stage}")
        split.ByHeads(self.tensor).own(cfg)

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Over the first of `devices` (None: this process's). ValueError if there are too few."""
        devices = list(jax.local_devices() if devices is None else devices)
        if len(devices) < self.num_devices:
            raise ValueError(f"mesh {self}: {self.num_devices} devices are needed, there are {len(devices)}")
        return jax.make_mesh(self.sizes, _AXES, _AUTO, devices=devices[: self.num_devices])

    def abstract(self) -> AbstractMesh:
        """For lowering without devices."""
        return AbstractMesh(self.sizes, _AXES, _AUTO)

    def __str__(self) -> str:
        named = zip(_AXES, self.sizes, strict=True)
        return ",".join(f"{axis}:{size}" for axis, size in named if size > 1) or "stage:1"


_AXES = (DATA, STAGE, TENSOR)
_AUTO = (AxisType.Auto,) * 3


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


def specs(table: Any) -> Any:
    """The `PartitionSpec` of every `Param` of a table."""
    return jax.tree.map(lambda p: partition_spec(p.axes), table, is_leaf=lambda leaf: isinstance(leaf, Param))


def param_shardings(cfg: LlamaConfig, mesh: Mesh) -> Params:
    """A NamedSharding for every parameter of `param_table`, for `mesh` (which has the axis `tensor`)."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(param_table(cfg)))


def row_order(param: Param, num_tensor: int) -> np.ndarray:
    """The rows of a matrix in the order in which `num_tensor` equal runs of them are the devices' shares: each has its
    share of every matrix that stands in it.

    Raises ValueError for one that does not divide.
    """
    rows = np.arange(param.shape[0])
    if num_tensor == 1 or param.axes[0] is None or LOGICAL_TO_MESH[param.axes[0]] != TENSOR:
        return rows
    parts = param.parts or (param.shape[0],)
    if any(part % num_tensor for part in parts):
        raise ValueError(f"matrices of {parts} rows do not divide over tensor:{num_tensor}")
    cuts = [part.reshape(num_tensor, -1) for part in np.split(rows, np.cumsum(parts)[:-1])]
    return np.concatenate(cuts, axis=1).reshape(-1)

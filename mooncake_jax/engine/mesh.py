"""The devices that an engine computes on side by side, and where its arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import split


class EngineMesh:
    """`devices` as a mesh of one axis, `models.split.AXIS`."""

    WHOLE = PartitionSpec()  # on every device
    PARTS = PartitionSpec(split.AXIS)  # the first axis in equal parts

    def __init__(self, devices: Sequence[Any]) -> None:
        self.mesh = Mesh(np.array(devices), (split.AXIS,))
        self.whole = NamedSharding(self.mesh, self.WHOLE)
        self.parts = NamedSharding(self.mesh, self.PARTS)

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    @property
    def first(self) -> Any:
        """The `jax.Device` that does what needs only one."""
        return self.mesh.devices[0]

    def side_by_side(self, step: Callable[..., Any], given: Any, returned: Any) -> Callable[..., Any]:
        """`step` as each device runs it on its part; the specs are of its arguments and results."""
        return jax.shard_map(step, mesh=self.mesh, in_specs=given, out_specs=returned, check_vma=False)

    def spec(self, axis: int | None) -> PartitionSpec:
        """Equal parts along `axis`; None: the whole on every device."""
        return self.WHOLE if axis is None else PartitionSpec(*[None] * axis, split.AXIS)

    def put(self, array: np.ndarray, spec: PartitionSpec = WHOLE) -> jax.Array:
        """A host array on the devices. It may be read in place: keep it unchanged until the step is done."""
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def numbers(self, *values: int) -> jax.Array:
        """The small integers that a program takes, as one array."""
        return self.put(np.array(values, np.int32))

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

    def put(self, array: np.ndarray) -> jax.Array:
        """A host array on every device. It may be read in place: keep it unchanged until the step is done."""
        return jax.device_put(array, self.whole)

    def numbers(self, first: int, second: int = 0, third: int = 0) -> jax.Array:
        """The `[3]` small integers that a program takes."""
        return self.put(np.array([first, second, third], np.int32))

    def put_parts(self, array: np.ndarray) -> jax.Array:
        """A host array with its first axis cut over the devices."""
        return jax.device_put(array, self.parts)

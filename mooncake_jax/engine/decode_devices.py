"""Where a decode engine's arrays lie: on one device, or over devices that share the heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import cache, llama, tensor_parallel
from models.config import LlamaConfig
from models.platform import Platform
from models.split import ByHeads

_WHOLE = PartitionSpec()
_ONE_BLOCK = PartitionSpec(*tensor_parallel.BLOCKS[1:])


class DecodeDevices:
    """`mesh` None: JAX's default device. Otherwise a mesh of `models.sharding` whose only axis above 1 is `tensor`."""

    def __init__(self, mesh: Mesh | None):
        self._mesh = mesh
        self._first = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]

    def whole(self, array: np.ndarray) -> jax.Array:
        """A copy on every device."""
        return self._put(array, _WHOLE)

    def on_first(self, array: np.ndarray | jax.Array) -> jax.Array:
        """On the device that does what needs only one: the head and drawing."""
        if self._mesh is None:
            return jax.device_put(array)
        if isinstance(array, jax.Array):
            return next(share.data for share in array.addressable_shards if share.device == self._first)
        return jax.device_put(array, self._first)

    def layers(self, cfg: LlamaConfig, layers: list[llama.Params]) -> list[llama.Params]:
        """Host parameters of `models.llama.param_table`."""
        if self._mesh is None:
            return jax.tree.map(jax.device_put, layers)
        return tensor_parallel.place(llama.param_table(cfg)["layers"], self._mesh, layers)

    def empty_pages(self, shape: tuple[int, ...], storage: np.dtype) -> jax.Array:
        """One layer's cache; its memory is touched, not only mapped."""
        return self._put(np.full(shape, 0, storage), tensor_parallel.PAGES)

    def group_step(self, cfg: LlamaConfig, platform: Platform) -> Callable[..., Any]:
        """`models.llama.decode_group` of `(layers, x, rotation, pages, positions, active)`."""
        if self._mesh is None:
            return functools.partial(llama.decode_group, cfg, platform, ByHeads(1))
        return tensor_parallel.decode_group(cfg, platform, self._mesh)

    def insert_step(self) -> Callable[..., Any]:
        """`models.cache.insert_blocks`."""
        pages = tensor_parallel.PAGES
        return self._shared(cache.insert_blocks, (pages, tensor_parallel.BLOCKS, _WHOLE, _WHOLE), pages)

    def extract_step(self) -> Callable[..., Any]:
        """`models.cache.extract_block`."""
        return self._shared(cache.extract_block, (tensor_parallel.PAGES, _WHOLE, _WHOLE), _ONE_BLOCK)

    @property
    def of_whole(self) -> NamedSharding | None:
        """The sharding of activations between programs; None: nothing to say."""
        return None if self._mesh is None else NamedSharding(self._mesh, _WHOLE)

    def _put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        if self._mesh is None:
            return jax.device_put(array)
        return jax.device_put(array, NamedSharding(self._mesh, spec))

    def _shared(self, step: Callable[..., Any], given: Any, returned: Any) -> Callable[..., Any]:
        if self._mesh is None:
            return step
        return jax.shard_map(step, mesh=self._mesh, in_specs=given, out_specs=returned, check_vma=False)

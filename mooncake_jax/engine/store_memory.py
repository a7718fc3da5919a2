"""A home node's DRAM as the device reads it, where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.block import BlockFormat
from models.attention import StoredBlocks
from mooncake_jax.engine.mesh import EngineMesh


class StoreMemory:
    """Others write into it meanwhile; what a step reads must not change until the step is done (leases see to that)."""

    def __init__(
        self, mesh: EngineMesh, block_format: BlockFormat, storage: np.dtype, places: int, memory: np.ndarray
    ) -> None:
        """`memory`: uint8 `[slots, BlockFormat.nbytes]`, contiguous; `places`: the most blocks a step may be given.

        Raises ValueError for memory of another kind.
        """
        if (
            memory.shape[1:] != (block_format.nbytes,)
            or memory.dtype != np.uint8
            or not memory.flags.c_contiguous
        ):
            raise ValueError(
                f"store memory: expected contiguous uint8 [slots, {block_format.nbytes}], "
                f"got {memory.dtype} {list(memory.shape)}"
            )
        self._mesh, self._format, self._max_places = mesh, block_format, places
        self._host = memory.view(block_format.item_dtype).reshape(-1, *block_format.shape)
        self._blocks = mesh.put(self._host.view(storage))
        self._is_in_place = all(
            shard.data.unsafe_buffer_pointer() == memory.ctypes.data
            for shard in self._blocks.addressable_shards
        )
        self._first_layers = [
            mesh.put(np.array(group * block_format.layers_per_group, np.int32))
            for group in range(block_format.num_groups)
        ]
        self._nothing = [self._stored(group, []) for group in range(block_format.num_groups)]

    @property
    def num_slots(self) -> int:
        return len(self._host)

    def nothing(self, group: int) -> StoredBlocks:
        """No blocks."""
        return self._nothing[group]

    def block(self, group: int, slot: int) -> np.ndarray:
        """A layer group's range of the block in `slot`, `[l, K, 2, Z, H]`."""
        size = self._format.layers_per_group
        return self._host[slot, group * size : (group + 1) * size]

    def find(self, group: int, blocks: Sequence[np.ndarray]) -> StoredBlocks | None:
        """`blocks` are a layer group's range of some blocks, `[l, K, 2, Z, H]` each: None unless all lie in this memory
        and the devices read it in place."""
        if not self._is_in_place:
            return None
        begin, nbytes = self.block(group, 0).ctypes.data, self._format.nbytes
        places = []
        for block in blocks:
            place, rest = divmod(block.__array_interface__["data"][0] - begin, nbytes)
            if rest or not 0 <= place < len(self._host):
                return None
            places.append(place)
        return self._stored(group, places)

    def _stored(self, group: int, places: list[int]) -> StoredBlocks:
        padded = np.zeros(self._max_places, np.int32)
        padded[: len(places)] = places
        num_blocks = self._mesh.put(np.array(len(places), np.int32))
        return StoredBlocks(self._blocks, self._mesh.put(padded), num_blocks, self._first_layers[group])

"""Memory of a prefill server through which KV goes to and from the members of its group."""

from __future__ import annotations

import math

import numpy as np

from mooncake_jax.engine.stages import PipelinePlan

NUM_AREAS = 2  # as many as ticks may be unfinished


class Landing:
    """Where in the memory things are: areas for the new blocks of every stage at a tick, then prefix blocks."""

    def __init__(self, plan: PipelinePlan):
        self._plan = plan
        item = plan.format.item_dtype.itemsize
        self._block_nbytes = math.prod(plan.stage_block_shape) * item
        self._chunk_nbytes = plan.chunk_blocks * self._block_nbytes
        self.prefix_offset = NUM_AREAS * plan.num_stages * self._chunk_nbytes
        self.nbytes = self.prefix_offset + plan.load_blocks * self._block_nbytes

    def offset(self, area: int, stage: int) -> int:
        """Of the new blocks of a stage."""
        return (area * self._plan.num_stages + stage) * self._chunk_nbytes

    def new_blocks(self, memory: np.ndarray, area: int, stage: int) -> np.ndarray:
        """A view of uint8 `memory`, `[M, L/X, K, 2, Z, H]` for the longest chunk."""
        return self._blocks(memory, self.offset(area, stage), self._plan.chunk_blocks)

    def prefix_blocks(self, memory: np.ndarray, count: int) -> np.ndarray:
        """A view of `memory`, `[count, L/X, K, 2, Z, H]`."""
        return self._blocks(memory, self.prefix_offset, count)

    def _blocks(self, memory: np.ndarray, offset: int, count: int) -> np.ndarray:
        raw = memory[offset : offset + count * self._block_nbytes]
        return raw.view(self._plan.format.item_dtype).reshape(count, *self._plan.stage_block_shape)

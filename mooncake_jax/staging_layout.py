"""Where flags and blocks lie in a staging region: prefill writes it one-sidedly, decode reads it (see
`StagingHandle`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.block import BlockFormat

PAGE_NBYTES = 4096
FLAG_DTYPE = np.dtype("<u4")
FLAG_WORDS = 2  # generation, crc32


class StagingLayout(NamedTuple):
    """Byte offsets in the region of a prompt of `num_blocks` blocks; flags first, `[num_blocks, num_groups, 2]`."""

    format: BlockFormat
    num_blocks: int

    @property
    def flags_shape(self) -> tuple[int, int, int]:
        return (self.num_blocks, self.format.num_groups, FLAG_WORDS)

    @property
    def row_nbytes(self) -> int:
        """Flags of one block: every layer group's generation and crc32."""
        return self.format.num_groups * FLAG_WORDS * FLAG_DTYPE.itemsize

    @property
    def blocks_offset(self) -> int:
        """First byte of block 0: the flags, padded to whole pages."""
        return -(-self.num_blocks * self.row_nbytes // PAGE_NBYTES) * PAGE_NBYTES

    @property
    def nbytes(self) -> int:
        return self.blocks_offset + self.num_blocks * self.format.nbytes

    def part_offset(self, block: int, group: int) -> int:
        """First byte of layer group `group` of `block`."""
        return self.blocks_offset + block * self.format.nbytes + self.format.group_offset(group)

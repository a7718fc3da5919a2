"""The staging region's bytes: flags, padding, blocks."""

from kvstore.block import BlockFormat
from mooncake_jax.staging_layout import PAGE_NBYTES, StagingLayout

FORMAT = BlockFormat(
    num_layers=4, num_kv_heads=2, head_dim=2, block_tokens=4, dtype="bfloat16", layers_per_group=2
)


def test_offsets_follow_the_documented_layout():
    layout = StagingLayout(FORMAT, 3)
    assert layout.flags_shape == (3, 2, 2)
    assert layout.row_nbytes == 16
    assert layout.blocks_offset == PAGE_NBYTES
    assert layout.part_offset(2, 1) == PAGE_NBYTES + 2 * FORMAT.nbytes + FORMAT.group_nbytes
    assert layout.nbytes == layout.part_offset(2, 1) + FORMAT.group_nbytes


def test_flags_take_more_pages_for_more_blocks():
    assert StagingLayout(FORMAT, 256).blocks_offset == PAGE_NBYTES
    assert StagingLayout(FORMAT, 257).blocks_offset == 2 * PAGE_NBYTES

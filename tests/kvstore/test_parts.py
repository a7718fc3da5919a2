"""Parts and their crcs."""

from __future__ import annotations

import zlib

import pytest

from kvstore.parts import covered_parts, num_parts, part_crcs


def test_the_last_part_may_be_short():
    data = memoryview(bytes(range(250)))
    assert num_parts(250, 100) == 3
    assert part_crcs(data, 100) == tuple(zlib.crc32(data[a:b]) for a, b in ((0, 100), (100, 200), (200, 250)))


@pytest.mark.parametrize(
    ("offset", "nbytes", "expected"),
    [
        (0, 250, range(0, 3)),
        (100, 100, range(1, 2)),
        (200, 50, range(2, 3)),
        (200, 49, None),
        (50, 100, None),
        (0, 150, None),
    ],
)
def test_which_parts_a_range_is_made_of(offset: int, nbytes: int, expected: range | None):
    assert covered_parts(offset, nbytes, 250, 100) == expected

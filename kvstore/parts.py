"""A part is what one crc32 covers: for a KV block, a layer group."""

from __future__ import annotations

import zlib


def num_parts(nbytes: int, part_nbytes: int) -> int:
    """Parts of an object; the last one may be shorter."""
    return -(-nbytes // part_nbytes)


def part_crcs(data: memoryview, part_nbytes: int) -> tuple[int, ...]:
    """crc32 of each part of `data` (bytes)."""
    return tuple(zlib.crc32(data[start : start + part_nbytes]) for start in range(0, len(data), part_nbytes))


def covered_parts(offset: int, nbytes: int, total_nbytes: int, part_nbytes: int) -> range | None:
    """The parts that make up bytes `offset … offset + nbytes`; None if the range cuts a part."""
    end = offset + nbytes
    if offset % part_nbytes or (end % part_nbytes and end != total_nbytes):
        return None
    return range(offset // part_nbytes, num_parts(end, part_nbytes))

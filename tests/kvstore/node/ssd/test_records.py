"""Journal records: whole ones are read, whatever follows the first broken one is not."""

from __future__ import annotations

import random

import pytest

from kvstore.node.ssd.records import Drop, Header, Put, frame, parse

RECORDS = [Header(1, 4096), Put(b"k" * 16, 3, 1000, 400, (1, 2, 2**32 - 1)), Drop(b"k" * 16)]


def test_records_come_back_as_they_were():
    raw = b"".join(map(frame, RECORDS))
    assert parse(raw) == (RECORDS, len(raw))


def test_every_torn_end_is_cut_at_a_record():
    frames = [frame(record) for record in RECORDS]
    raw = b"".join(frames)
    ends = [sum(map(len, frames[:count])) for count in range(4)]
    for size in range(len(raw) + 1):
        records, good = parse(raw[:size])
        whole = max(count for count in range(4) if ends[count] <= size)
        assert (records, good) == (RECORDS[:whole], ends[whole])


def test_every_flipped_bit_is_noticed():
    raw = b"".join(map(frame, RECORDS))
    for bit in range(8 * len(raw)):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        records, good = parse(bytes(broken))
        assert records == RECORDS[: len(records)]
        assert good <= bit // 8


@pytest.mark.parametrize("tail", [bytes(100), random.Random(1).randbytes(100)])
def test_what_a_file_system_leaves_behind_a_crash_is_no_record(tail):
    raw = frame(RECORDS[0])
    assert parse(raw + tail) == (RECORDS[:1], len(raw))


def test_a_drop_never_takes_more_than_the_put_it_ends():
    assert len(frame(Drop(b"k" * 16))) <= len(frame(Put(b"k" * 16, 0, 1, 1, ())))

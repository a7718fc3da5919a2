"""The journal while it is compacted: nothing that is appended meanwhile is lost, and its bound holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.node.ssd.journal import Journal
from kvstore.node.ssd.records import VERSION, Header, Put, frame

HEADER = Header(VERSION, 4096)
NUM = 40


def record(number: int) -> Put:
    return Put(number.to_bytes(16, "big"), number, 1000, 1000, (number,))


NBYTES = len(frame(record(1)))


def filled(path: Path, max_nbytes: int = 1 << 16) -> Journal:
    """With a put of each of `NUM` keys."""
    journal = Journal(path, HEADER, max_nbytes)
    for number in range(NUM):
        journal.put(frame(record(number)))
    return journal


def said(path: Path) -> list[int]:
    journal = Journal(path, HEADER, 1 << 16)
    numbers = [put.slot for put, _ in journal.take_replayed()]
    journal.close()
    return numbers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_records_between_begin_and_end_are_in_the_new_file(path: Path):
    journal = filled(path)
    journal.drop(record(0).key, NBYTES)
    before = journal.nbytes
    journal.begin(map(record, range(1, NUM)))
    journal.drop(record(1).key, NBYTES)
    journal.sync()
    journal.put(frame(record(NUM)))
    journal.end()
    journal.sync_folder()
    assert journal.nbytes == path.stat().st_size < before + 2 * NBYTES
    journal.drop(record(2).key, NBYTES)
    journal.close()
    assert said(path) == list(range(3, NUM + 1))


def test_a_compaction_that_has_no_room_any_more_is_given_up_and_the_old_file_stays(path: Path):
    max_nbytes = 2 * (NUM + 1) * NBYTES + 10 * NBYTES
    journal = filled(path, max_nbytes)
    new = path.with_name("journal.new")
    journal.begin(map(record, range(NUM)))
    assert new.exists()
    for number in range(NUM // 2):
        journal.drop(record(number).key, NBYTES)
        assert path.stat().st_size + (new.stat().st_size if new.exists() else 0) <= max_nbytes
    assert not new.exists()
    journal.sync()
    journal.end()
    journal.compact(map(record, range(NUM // 2, NUM)))
    assert path.stat().st_size <= (NUM // 2 + 1) * NBYTES
    journal.close()
    assert said(path) == list(range(NUM // 2, NUM))


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_crash_within_a_compaction_leaves_the_old_file(path: Path, is_synced: bool):
    journal = filled(path)
    journal.begin(map(record, range(5)))
    if is_synced:
        journal.sync()
    journal.drop(record(7).key, NBYTES)
    assert said(path) == [number for number in range(NUM) if number != 7]
    assert not path.with_name("journal.new").exists()
    journal.close()


def test_what_a_compaction_leaves_out_makes_room(path: Path):
    journal = filled(path, 3 * NUM * NBYTES)
    journal.compact(map(record, range(3)))
    assert journal.fits_compacted(NUM * NBYTES)
    journal.close()

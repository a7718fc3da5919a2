"""The SSD tier on real files: what it returns is what was put, and it never takes more than its bytes."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import InvalidError
from kvstore.node.ssd import SsdTier, num_ssd_slots
from kvstore.node.ssd import journal as journal_file
from kvstore.parts import part_crcs

NBYTES, PART = 1000, 300
SMALL = 200_000  # bytes of SSD: a few slots
Open = Callable[..., SsdTier]


def keys(count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


def content(key: bytes, nbytes: int = NBYTES) -> bytes:
    return random.Random(key).randbytes(nbytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def open_tier(folder: Path):
    """`open_tier(nbytes)`; the tier that was open before is closed, as are all in the end."""
    opened: list[SsdTier] = []

    def start(nbytes: int = SMALL, slot_nbytes: int = NBYTES, **arguments) -> SsdTier:
        for tier in opened:
            tier.validate()
            tier.close()
        opened.append(SsdTier(folder, nbytes, slot_nbytes, **arguments))
        return opened[-1]

    yield start
    for tier in opened:
        tier.validate()
        tier.close()


def put(tier: SsdTier, some: list[bytes], nbytes: int = NBYTES) -> list[bytes]:
    """Those that were taken."""
    taken = []
    for key in some:
        data = memoryview(content(key, nbytes))
        staged = tier.stage(key, data, PART, part_crcs(data, PART))
        if staged is not None:
            tier.publish([staged])
            taken.append(key)
    tier.sync()
    return taken


def get(tier: SsdTier, key: bytes) -> bytes | None:
    said = tier.describe(key)
    if said is None:
        return None
    into = bytearray(said.nbytes)
    return bytes(into) if tier.read(said, memoryview(into)) else None


def used(folder: Path) -> int:
    """As `du` counts: the folder and every file in it, in bytes on disk."""
    return sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))


def test_what_is_put_is_read_and_survives_a_restart(open_tier: Open):
    tier, some = open_tier(), keys(5)
    assert put(tier, some) == some
    tier.drop(some[1])
    expected = [None if index == 1 else content(key) for index, key in enumerate(some)]
    assert [get(tier, key) for key in some] == expected
    tier = open_tier()
    assert [get(tier, key) for key in some] == expected


def test_least_recently_used_gives_way_also_after_a_restart(open_tier: Open):
    tier = open_tier()
    some = keys(tier.num_slots + 3)
    put(tier, some[: tier.num_slots])
    assert get(tier, some[0])
    put(tier, some[tier.num_slots : -1])
    assert tier.take_gone() == some[1:3]
    assert some[0] in tier
    tier = open_tier()
    put(tier, some[-1:])
    assert tier.take_gone() == some[:1], "uses are not written down: the order is that of the puts"


@pytest.mark.parametrize("num_parts", [1, 200])
@pytest.mark.parametrize("batch", [1, 8])
def test_disk_use_stays_under_the_cap_at_all_times(
    open_tier: Open, folder: Path, monkeypatch, num_parts, batch
):
    """Also while the journal is compacted, when the old one and the new one are both there: it is never cut first."""
    peak = 0
    rename = os.rename

    def watched(*names) -> None:
        nonlocal peak
        peak = max(peak, used(folder))
        rename(*names)

    def never(*_) -> None:
        raise AssertionError("the journal was cut before its successor was there")

    monkeypatch.setattr(journal_file.os, "rename", watched)
    cap, nbytes, waiting = 400_000, 4000, []
    tier = open_tier(cap, 4096)
    monkeypatch.setattr(journal_file.os, "ftruncate", never)
    for index, key in enumerate(keys(1500)):
        data = memoryview(content(key, nbytes))
        part = nbytes // num_parts
        staged = tier.stage(key, data, part, part_crcs(data, part))
        assert staged is not None
        waiting.append(staged)
        if len(waiting) == batch:
            tier.publish(waiting)
            waiting.clear()
        if index % 50 == 0:
            peak = max(peak, used(folder))
    tier.publish(waiting)
    assert rename is not watched
    assert 100_000 < peak <= cap
    assert tier.stats()["ssd_failed"] == 0
    last = keys(1500)[-1]
    assert get(tier, last) == content(last, nbytes)


def test_a_compaction_holds_up_nobody_who_drops(open_tier: Open, folder: Path, monkeypatch):
    """Its sync may take seconds. What is dropped meanwhile stays dropped, and the cap holds."""
    cap, began, may_end, sync = 400_000, threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        began.set()
        assert may_end.wait(200)
        sync(fd)

    monkeypatch.setattr(journal_file.os, "fsync", slow)
    tier = open_tier(cap, 4096)
    writer = threading.Thread(target=put, args=(tier, keys(1500), 4000))
    writer.start()
    assert began.wait(200)
    dropped = tier.keys()[::2]
    for key in dropped:
        assert tier.drop(key)
        assert used(folder) <= cap
    assert (folder / "journal.new").exists()
    assert len(dropped) > 10
    assert not set(dropped).intersection(tier.keys())
    may_end.set()
    writer.join()
    held = tier.keys()
    tier = open_tier(cap, 4096)
    assert set(tier.keys()) == set(held)
    assert [get(tier, key) for key in held] == [content(key, 4000) for key in held]
    assert not set(dropped).intersection(held)


def test_a_foreign_file_counts_and_a_lower_cap_is_kept(open_tier: Open, folder: Path):
    tier = open_tier(600_000)
    many = keys(200)
    put(tier, many)
    before = tier.num_slots
    (folder / "foreign").write_bytes(bytes(200_000))
    tier = open_tier(600_000)
    assert tier.num_slots < before
    assert used(folder) <= 600_000
    tier = open_tier(400_000)
    put(tier, many)
    assert used(folder) <= 400_000
    assert get(tier, many[-1]) == content(many[-1])


def test_a_folder_that_foreign_files_fill_is_a_disk_that_cannot_be_used(open_tier: Open, folder: Path):
    folder.mkdir()
    (folder / "foreign").write_bytes(bytes(SMALL))
    with pytest.raises(OSError, match="other files") as caught:
        open_tier()
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("harm", ["flip", "half", "empty", "delete"])
def test_damage_is_a_miss_and_a_count_and_never_bytes(open_tier: Open, folder: Path, harm: str):
    tier, some = open_tier(), keys(4)
    put(tier, some)
    slots = folder / "slots"
    if harm == "flip":
        raw = bytearray(slots.read_bytes())
        raw[500] ^= 1
        slots.write_bytes(raw)
    elif harm == "delete":
        slots.unlink()
        tier = open_tier()
    else:
        os.truncate(slots, slots.stat().st_size // 2 if harm == "half" else 0)
    found = [get(tier, key) for key in some]
    assert all(data in (None, content(key)) for key, data in zip(some, found, strict=True))
    num_lost = found.count(None)
    assert num_lost == {"flip": 1, "half": 2, "empty": 4, "delete": 4}[harm]
    assert tier.stats()["ssd_damaged"] == (0 if harm == "delete" else num_lost)
    assert [key in tier for key in some] == [data is not None for data in found]
    assert len(tier.take_gone()) == (0 if harm == "delete" else num_lost)
    assert put(tier, some) == some
    assert [get(tier, key) for key in some] == [content(key) for key in some]


def test_a_journal_cut_anywhere_never_gives_wrong_bytes(open_tier: Open, folder: Path):
    tier = open_tier()
    some = keys(3 * tier.num_slots)
    put(tier, some)
    tier.close()
    journal = (folder / "journal").read_bytes()
    for size in [*range(0, len(journal), 37), len(journal)]:
        (folder / "journal").write_bytes(journal[:size])
        tier = open_tier()
        for key in some:
            assert get(tier, key) in (None, content(key))
        tier.close()
    assert sum(get(open_tier(), key) is not None for key in some) > 0


def test_slots_of_another_size_start_empty(open_tier: Open):
    some = keys(3)
    put(open_tier(), some)
    tier = open_tier(SMALL, 5000)
    assert tier.keys() == []
    assert put(tier, some, 5000) == some


def test_two_nodes_do_not_share_a_folder(open_tier: Open, folder: Path):
    open_tier()
    with pytest.raises(InvalidError, match="in use by another store node"):
        SsdTier(folder, SMALL, NBYTES)
    with pytest.raises(InvalidError, match="do not hold one slot"):
        num_ssd_slots(1000, NBYTES)


def no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_what_is_written_now_and_nothing_else(open_tier: Open, monkeypatch, caplog):
    now = 100.0
    tier = open_tier(clock=lambda: now)
    some = keys(4)
    put(tier, some[:1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_room)
        assert put(tier, some[1:2]) == []
    assert "DRAM only for the next 1 s" in caplog.text
    assert tier.stats()["ssd_failed"] == 1
    assert not tier.accepts
    assert put(tier, some[2:3]) == [], "it rests"
    assert get(tier, some[0]) == content(some[0])
    now += 1.5
    assert put(tier, some[3:]) == some[3:]
    tier = open_tier()
    assert sorted(tier.keys()) == sorted([some[0], some[3]])


def test_no_room_for_a_record_leaves_no_half_of_it(open_tier: Open, monkeypatch):
    now = 100.0
    tier, some = open_tier(clock=lambda: now), keys(3)
    put(tier, some[:1])
    write = os.write

    def half(fd: int, raw: memoryview) -> int:
        if len(raw) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, raw[: len(raw) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(journal_file.os, "write", half)
        put(tier, some[1:2])
    assert some[1] not in tier
    now += 2
    put(tier, some[2:])
    tier = open_tier()
    assert [get(tier, key) for key in some] == [content(some[0]), None, content(some[2])]


def test_a_journal_that_cannot_say_what_is_dropped_ends_the_tier(open_tier: Open, monkeypatch, caplog):
    """Or the next start would find objects again that were removed."""
    tier, some = open_tier(), keys(3)
    put(tier, some)
    with monkeypatch.context() as patch:
        patch.setattr(journal_file.os, "write", no_room)
        assert tier.drop(some[0])
    assert "DRAM only from now on" in caplog.text
    assert set(tier.take_gone()) >= set(some[1:])
    assert put(tier, keys(1, seed=9)) == []
    assert tier.keys() == open_tier().keys() == []

import fcntl
import os
import stat
import tempfile

import msgspec
import numpy as np
import pytest

from kvstore.transfer import READ, SharedBuffer, TransferError, TransferRequest
from kvstore.transfer.transport.shm import sweep_stale

DEAD_PID = 2**22 + 1  # above any process id that Linux hands out


@pytest.fixture
def planted(nothing_leaks):
    """Creates files under /dev/shm by name, and removes those that are left."""
    paths = []

    def plant(name, nbytes=100):
        paths.append(f"/dev/shm/{name}")
        with open(paths[-1], "wb") as file:
            file.truncate(nbytes)
        return paths[-1]

    yield plant
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


def test_a_shared_buffer_is_zeroed_private_to_the_user_and_named_after_its_process(make_shared):
    shared = make_shared("kv.slots-1", 10_000)
    assert shared.path.startswith(f"/dev/shm/mooncake-{os.getpid()}-")
    assert shared.path.endswith("-kv.slots-1")
    assert stat.S_IMODE(os.stat(shared.path).st_mode) == 0o600
    assert os.stat(shared.path).st_size == shared.nbytes == 10_000
    assert os.stat(shared.path).st_blocks * 512 >= 10_000  # its pages are there already
    assert shared.array.shape == (10_000,)
    assert shared.array.dtype == np.uint8
    assert not shared.array.any()
    shared.array[3] = 7
    with open(shared.path, "rb") as file:
        assert file.read(5) == b"\0\0\0\7\0"


def test_close_removes_the_file_and_leaves_views_valid(make_shared):
    shared = make_shared("x", 4096)
    view = shared.array
    view[:] = 1
    shared.close()
    shared.close()
    assert not os.path.exists(shared.path)
    assert view.sum() == 4096
    with pytest.raises(ValueError, match="is closed"):
        _ = shared.array


@pytest.mark.parametrize(
    ("name", "nbytes"), [("", 1), ("a/b", 1), ("../x", 1), ("x" * 101, 1), ("x", 0), ("x", -1)]
)
def test_bad_names_and_sizes(name, nbytes):
    with pytest.raises(ValueError, match="shared buffer"):
        SharedBuffer(name, nbytes)


def test_no_room_is_an_error_not_a_crash():
    said = r"no 4611686018427387904 bytes of shared memory for 'huge': .*[0-9]+ bytes are free in /dev/shm.*--shm-size"
    with pytest.raises(OSError, match=said):
        SharedBuffer("huge", 1 << 62)


def test_the_sweep_takes_what_nobody_owns_and_nothing_else(planted, make_shared):
    live = make_shared("live", 100)
    stale = planted(f"mooncake-{DEAD_PID}-{'0' * 16}-slots")
    foreign = planted(f"mooncakes-{DEAD_PID}-{'0' * 16}-slots")
    held = planted(f"mooncake-{DEAD_PID}-{'1' * 16}-slots")
    fd = os.open(held, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        removed = sweep_stale()
        assert not os.path.exists(stale)
        for path in (live.path, foreign, held):
            assert path not in removed
            assert os.path.exists(path)
    finally:
        os.close(fd)


def test_a_new_buffer_sweeps_first(planted, make_shared):
    stale = planted(f"mooncake-{DEAD_PID}-{'2' * 16}-slots")
    make_shared("x", 1)
    assert not os.path.exists(stale)


def test_a_segment_cannot_make_us_map_any_file(make_pair, planted):
    pair = make_pair("shm", 100)
    sink = bytearray(b"untouched!")

    def refused(match, **changes):
        bad = msgspec.structs.replace(pair.segment, **changes)
        with pytest.raises(TransferError, match=match):
            pair.engine.transfer([TransferRequest(READ, memoryview(sink), bad, 0)])
        assert sink == b"untouched!"

    with tempfile.NamedTemporaryFile() as file:
        file.truncate(100)
        link = f"/dev/shm/mooncake-{DEAD_PID}-{'3' * 16}-link"
        os.symlink(file.name, link)
        try:
            for path in (
                file.name,
                "/etc/passwd",
                f"/dev/shm/../..{file.name}",
                pair.segment.shm_path + "\0",
                "relative",
            ):
                refused("no shared memory of ours", shm_path=path)
            refused("stale segment .*symbolic", shm_path=link)
        finally:
            os.unlink(link)
    refused("stale segment .*No such file", shm_path=pair.segment.shm_path + "x")
    refused("stale segment", shm_path=planted(f"mooncake-{DEAD_PID}-{'4' * 16}-dead"))
    refused("claims 101 bytes, .* has 100", nbytes=101)
    pair.engine.transfer([TransferRequest(READ, memoryview(sink), pair.segment, 0)])
    assert sink == bytes(10)
    sink[:] = b"untouched!"
    refused("claims 101 bytes, .* has 100", nbytes=101)  # mapped by now


def test_a_closed_buffer_is_stale_and_unmapped_everywhere(make_pair, make_shared):
    pair = make_pair("shm", 100)
    sink = bytearray(10)
    request = TransferRequest(READ, memoryview(sink), pair.segment, 0)
    pair.engine.transfer([request])
    path = pair.segment.shm_path

    def mapped():
        with open("/proc/self/maps") as file:
            return sum(path in line for line in file)

    owner_and_engine = mapped()
    pair.owner.close()
    pair.memory = None
    make_shared.buffers[0].close()
    assert mapped() == owner_and_engine - 1
    with pytest.raises(TransferError, match="stale segment"):
        pair.engine.transfer([request])
    assert mapped() == 0


def test_attaching_unmaps_the_segments_of_owners_that_have_gone(make_engine, make_shared):
    engine, owner = make_engine("a"), make_engine("a")
    old, new = make_shared("old", 100), make_shared("new", 100)
    for shared in (old, new):
        segment = owner.register_local_memory(shared.array, name=shared.path, shm_path=shared.path)
        engine.transfer([TransferRequest(READ, memoryview(bytearray(10)), segment, 0)])
        owner.unregister(shared.path)
        old.close()
    with open("/proc/self/maps") as file:
        assert old.path not in file.read()

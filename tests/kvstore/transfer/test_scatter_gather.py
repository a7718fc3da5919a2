"""Bytes go where they should and nowhere else, on every path."""

import threading

import numpy as np
import pytest

from kvstore.transfer import READ, WRITE, TransferRequest, TransferState

PATHS = ("loopback", "shm", "tcp")
COMPLETED = TransferState.COMPLETED


def disjoint_ranges(rng, nbytes, lengths):
    """Random, unaligned, non-overlapping offsets for `lengths` in `nbytes`, in random order."""
    gaps = rng.multinomial(nbytes - sum(lengths), np.ones(len(lengths) + 1) / (len(lengths) + 1))
    order = rng.permutation(len(lengths))
    offsets, at = np.zeros(len(lengths), int), 0
    for place, index in enumerate(order):
        at += gaps[place]
        offsets[index] = at
        at += lengths[index]
    return offsets.tolist()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(4))
def test_random_scatter_then_gather(make_pair, path, seed):
    rng = np.random.default_rng(seed)
    nbytes = 5_000_001
    pair = make_pair(path, nbytes)
    pair.memory[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    lengths = rng.choice([0, 1, 7, 4096, 40_001, 300_003], 25).tolist()
    remote, local = disjoint_ranges(rng, nbytes, lengths), disjoint_ranges(rng, nbytes, lengths)
    source = rng.integers(0, 256, nbytes, dtype=np.uint8)
    expected = pair.memory.copy()
    for offset, at, n in zip(remote, local, lengths, strict=True):
        expected[offset : offset + n] = source[at : at + n]

    view = memoryview(source)
    pair.engine.transfer(
        [
            TransferRequest(WRITE, view[a : a + n], pair.segment, o)
            for o, a, n in zip(remote, local, lengths, strict=True)
        ]
    )
    np.testing.assert_array_equal(pair.memory, expected)

    sink = rng.integers(0, 256, nbytes, dtype=np.uint8)
    filled = sink.copy()
    for offset, at, n in zip(remote, local, lengths, strict=True):
        filled[at : at + n] = expected[offset : offset + n]
    view = memoryview(sink)
    pair.engine.transfer(
        [
            TransferRequest(READ, view[a : a + n], pair.segment, o)
            for o, a, n in zip(remote, local, lengths, strict=True)
        ]
    )
    np.testing.assert_array_equal(sink, filled)
    counters = pair.engine.counters()
    assert counters.pop(f"{path}_read") == counters.pop(f"{path}_write") == sum(lengths)
    assert set(counters.values()) == {0}


@pytest.mark.parametrize("path", PATHS)
def test_more_pieces_than_one_system_call_takes(make_pair, path):
    pieces, size = 3000, 13
    pair = make_pair(path, pieces * size * 2)
    source = np.random.default_rng(0).integers(0, 256, pieces * size, dtype=np.uint8)
    view = memoryview(source)
    requests = [
        TransferRequest(WRITE, view[i * size : (i + 1) * size], pair.segment, 2 * i * size)
        for i in range(pieces)
    ]
    pair.engine.transfer(requests)
    rows = pair.memory.reshape(pieces, 2, size)
    np.testing.assert_array_equal(rows[:, 0].reshape(-1), source)
    assert not rows[:, 1].any()


@pytest.mark.parametrize("path", PATHS)
def test_a_64_mb_request_and_its_status(make_pair, path):
    pair = make_pair(path, 64 << 20)
    source = np.arange(8 << 20) * 0x1E3779B97F4A7C15  # any format, any shape
    batch = pair.engine.allocate_batch_id(2)
    pair.engine.submit_transfer(
        batch, [TransferRequest(WRITE, memoryview(source.reshape(8, -1)), pair.segment, 0)]
    )
    assert [(s.state, s.nbytes_done, s.reason) for s in pair.engine.wait(batch, 60)] == [
        (COMPLETED, 64 << 20, "")
    ]
    np.testing.assert_array_equal(pair.memory, source.view(np.uint8))
    sink = np.zeros_like(source)
    pair.engine.submit_transfer(batch, [TransferRequest(READ, memoryview(sink), pair.segment, 0)])
    assert [s.state for s in pair.engine.wait(batch, 60)] == [COMPLETED, COMPLETED]
    np.testing.assert_array_equal(sink, source)
    assert pair.engine.get_transfer_status(batch, 1).nbytes_done == 64 << 20
    pair.engine.free_batch_id(batch)


def test_requests_of_one_submit_for_several_targets_and_directions(make_engine, make_shared):
    engine, near, far = make_engine("a"), make_engine("a"), make_engine("b")
    shared = make_shared("near", 100)
    memories = {
        "loopback": np.arange(100, dtype=np.uint8),
        "shm": shared.array,
        "tcp": np.arange(100, 200, dtype=np.uint8),
    }
    memories["shm"][:] = np.arange(50, 150)
    segments = {
        "loopback": engine.register_local_memory(memories["loopback"], name="own"),
        "shm": near.register_local_memory(memories["shm"], name="near", shm_path=shared.path),
        "tcp": far.register_local_memory(memories["tcp"], name="far"),
    }
    sinks = {path: np.zeros(10, np.uint8) for path in segments}
    requests = []
    for path, segment in segments.items():
        requests.append(TransferRequest(READ, memoryview(sinks[path]), segment, 5))
        requests.append(TransferRequest(WRITE, memoryview(b"0123456789"), segment, 90))
    engine.transfer(requests)
    for path, memory in memories.items():
        np.testing.assert_array_equal(sinks[path], memory[5:15])
        assert memory[90:].tobytes() == b"0123456789"
    used = {name: count for name, count in engine.counters().items() if count}
    assert used == {f"{path}_{way}": 10 for path in segments for way in ("read", "write")}


def test_concurrent_submitters_do_not_mix_their_bytes(make_pair):
    share, rounds = 400_000, 5
    pair = make_pair("tcp", 4 * share)
    wrong: list[object] = []

    def worker(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            for _ in range(rounds):
                source = rng.integers(0, 256, share, dtype=np.uint8)
                sink = np.zeros(share, np.uint8)
                at = number * share
                pair.engine.transfer([TransferRequest(WRITE, memoryview(source), pair.segment, at)])
                pair.engine.transfer(
                    [
                        TransferRequest(READ, memoryview(sink)[i : i + 1000], pair.segment, at + i)
                        for i in range(0, share, 1000)
                    ]
                )
                if not np.array_equal(source, sink):
                    wrong.append(number)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert pair.engine.counters()["tcp_read"] == 4 * rounds * share


def test_ipv6(make_engine):
    owner = make_engine(host="::1")
    memory = np.arange(50, dtype=np.uint8)
    segment = owner.register_local_memory(memory, name="m")
    sink = np.zeros(50, np.uint8)
    make_engine().transfer([TransferRequest(READ, memoryview(sink), segment, 0)])
    np.testing.assert_array_equal(sink, memory)

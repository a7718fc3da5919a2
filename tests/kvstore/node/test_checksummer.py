"""Crcs of objects that were put without: computed in the background, and never of another object's bytes."""

from __future__ import annotations

import random
import zlib

NBYTES, PART = 1000, 400


def crcs(data: bytes) -> tuple[int, ...]:
    return tuple(zlib.crc32(data[start : start + PART]) for start in range(0, len(data), PART))


def test_they_are_computed_without_anybody_asking(cluster, eventually):
    store, rng = cluster.node("a"), random.Random(1)
    keys, data = [rng.randbytes(16) for _ in range(5)], [rng.randbytes(NBYTES) for _ in range(5)]
    assert cluster.client(store).put(keys, data, PART) == ["stored"] * 5
    blocks = [store.node._store._pool.find(key) for key in keys]
    eventually(lambda: [block.crcs for block in blocks] == [crcs(value) for value in data])


def test_an_object_that_gives_way_before_its_turn_is_passed_over(cluster, eventually):
    store, rng = cluster.node("a", num_slots=1), random.Random(2)
    client = cluster.client(store)
    old, new = [rng.randbytes(16) for _ in range(2)]
    client.put([old], [rng.randbytes(NBYTES)], PART)
    gone = store.node._store._pool.find(old)
    eventually(lambda: gone.crcs is not None)
    gone.crcs = None
    data = rng.randbytes(NBYTES)
    client.put([new], [data], PART)
    store.node._store.unchecked.put(gone)
    eventually(store.node._store.unchecked.empty)
    with store.node.lease([new]) as lease:
        assert lease.crcs(0) == crcs(data)
    assert gone.crcs is None

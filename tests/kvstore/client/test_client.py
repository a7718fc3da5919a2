"""The client over a real cluster: batches, per-item answers, and never a wrong byte."""

from __future__ import annotations

import random
import threading
import time

import msgspec
import numpy as np
import pytest

from kvstore import messages as m
from kvstore.errors import InvalidError, NotFoundError, StaleError, StoreError, UnavailableError
from kvstore.rpc import Stub
from kvstore.transfer import READ, WRITE, Faults

NBYTES, PART = 1000, 300


def blocks(count: int, seed: int = 1, nbytes: int = NBYTES) -> tuple[list[bytes], list[bytes]]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)], [rng.randbytes(nbytes) for _ in range(count)]


def test_put_at_home_get_from_the_same_and_another_host(cluster):
    a, b = cluster.node("a", host_id="one"), cluster.node("b", host_id="two")
    writer = cluster.client(a)
    keys, data = blocks(5)
    assert writer.put(keys, data, PART) == ["stored"] * 5
    assert writer.put(keys, data, PART) == ["present"] * 5
    assert writer.get(keys) == data
    cluster.settle()
    far = cluster.client(b)
    near = cluster.client(host_id="one")
    assert far.get(keys) == data
    assert near.get(keys) == data
    assert b.engine.counters()["tcp_read"] == 5 * NBYTES
    assert b.engine.counters()["shm_read"] == 0
    assert a.node.stats()["leases"] == 0
    assert [c.counters()[k] for c, k in ((writer, "home"), (far, "remote"), (near, "remote"))] == [5, 5, 5]
    unknown = blocks(2, seed=9)[0]
    assert far.get([unknown[0], keys[3], unknown[1]]) == [None, data[3], None]
    assert far.counters()["missed"] == 2


def test_get_into_fills_arrays_of_any_type(cluster):
    a = cluster.node("a")
    keys, _ = blocks(3)
    values = [np.arange(500, dtype="<u2").reshape(2, 250) + i for i in range(3)]
    assert cluster.client(a).put(keys, values, PART) == ["stored"] * 3
    cluster.settle()
    reader = cluster.client()
    into = [np.zeros((2, 250), "<u2") for _ in range(3)]
    assert reader.get_into(keys, into) == [True] * 3
    assert all(np.array_equal(x, y) for x, y in zip(into, values, strict=True))
    for client in (reader, cluster.client(a)):
        with pytest.raises(InvalidError, match="buffer 1 has 999 bytes"):
            client.get_into(keys[:2], [bytearray(1000), bytearray(999)])
    assert a.node.stats()["leases"] == 0


def test_malformed_arguments_are_refused(cluster):
    client = cluster.client(cluster.node("a"))
    keys, data = blocks(1)
    for call, match in (
        (lambda: client.put([b"short"], data), "16 bytes"),
        (lambda: client.put(keys, []), "1 keys but 0 buffers"),
        (lambda: client.put(keys, [b""]), "empty"),
        (lambda: client.put(keys, [np.zeros((4, 4))[:, 1]]), "contiguous"),
        (lambda: client.put(keys, data, 1), "parts"),
        (lambda: client.get_into(keys, [bytes(NBYTES)]), "read-only"),
        (lambda: client.get(["x" * 16]), "16 bytes"),
    ):
        with pytest.raises(InvalidError, match=match):
            call()


def test_without_home_puts_go_where_there_is_room(cluster):
    small, large = cluster.node("small", num_slots=2), cluster.node("large", num_slots=20)
    client, other = cluster.client(), cluster.client()
    keys, data = blocks(6)
    assert client.put(keys, data, PART) == ["stored"] * 6
    assert large.node.exists(keys) == [True] * 6
    assert client.exists(keys) == [True] * 6
    assert client.get(keys) == data
    cluster.settle()
    assert other.put(keys, data, PART) == ["present"] * 6
    assert other.get(keys) == data
    assert small.node.stats()["free"] == 2


def test_a_batch_may_repeat_keys_and_mix_sizes(cluster):
    client = cluster.client(cluster.node("a"))
    keys, data = blocks(3)
    data[1] = b"small"
    large = bytes(2000)
    assert client.put([keys[0], keys[1], keys[0], keys[2]], [data[0], data[1], data[0], large]) == [
        "stored",
        "stored",
        "present",
        "too_large",
    ]
    assert client.get(keys) == [data[0], b"small", None]


def test_what_fits_nowhere_and_what_has_no_room_now(cluster):
    a = cluster.node("a", num_slots=4)
    b = cluster.node("b", num_slots=2)
    client = cluster.client()
    keys, data = blocks(8)
    assert client.put(keys[:1], [bytes(1025)]) == ["too_large"]
    assert client.put(keys[:4], data[:4]) == ["stored"] * 4
    leases = [a.node.lease(keys), b.node.lease(keys)]
    results = client.put(keys[4:], data[4:])
    assert sorted(results) == ["no_room", "no_room", "stored", "stored"]
    for lease in leases:
        lease.close()
    assert client.put(keys[4:], data[4:]).count("no_room") == 0


def test_remove_is_visible_at_once_and_everywhere(cluster):
    a, b = cluster.node("a"), cluster.node("b")
    keys, data = blocks(2)
    home = cluster.client(a)
    home.put(keys, data)
    cluster.client(b).put(keys, data)
    cluster.settle()
    client = cluster.client()
    unknown = blocks(1, seed=8)[0]
    assert client.remove([*keys, *unknown]) == [True, True, False]
    assert client.exists(keys) == [False, False]
    assert client.get(keys) == [None, None]
    assert home.exists(keys, fresh=True) == [False, False]
    assert client.put(keys, data) == ["stored", "stored"]
    assert client.exists(keys) == [True, True]


def test_exists_does_not_pin_or_refresh(cluster):
    a = cluster.node("a", num_slots=8)
    home, prober = cluster.client(a), cluster.client()
    keys, data = blocks(40)
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            prober.exists(keys)
            prober.exists(keys, fresh=True)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        for key, value in zip(keys, data, strict=True):
            assert home.put([key], [value]) == ["stored"]
    finally:
        stop.set()
        thread.join()
    assert home.exists(keys, fresh=True) == [False] * 32 + [True] * 8
    assert a.node.stats()["evicted"] == 32


def test_a_stale_entry_is_a_miss_and_is_dropped(cluster):
    a, b = cluster.node("a"), cluster.node("b")
    keys, data = blocks(2)
    cluster.client(b).put(keys[:1], data[:1])
    cluster.settle()
    client = cluster.client()
    for key in keys:
        client._locator.note(key, "a", present=True)
    assert client.exists(keys) == [True, True]
    assert client.get(keys) == [data[0], None]
    assert client.exists(keys) == [True, False]
    assert a.node.stats()["leases"] == b.node.stats()["leases"] == 0


def test_a_corrupt_byte_on_the_way_is_a_miss_or_the_next_holders_bytes(cluster):
    a = cluster.node("a")
    keys, data = blocks(2)
    cluster.client(a).put(keys, data, PART)
    cluster.settle()
    faults = Faults(corrupt_byte=999, paths=frozenset(("tcp",)), only=lambda r: r.opcode == READ)
    client = cluster.client(faults=faults)
    assert client.get(keys) == [None, None]
    assert client.counters()["corrupt"] == 2
    assert a.node.exists(keys) == [True, True]  # the owner looked: its bytes are good
    b = cluster.node("b", host_id="host-client")
    cluster.client(b).put(keys, data, PART)
    cluster.settle()
    assert client.get(keys) == data  # from b, through shared memory
    faults.corrupt_byte = None
    b.node.remove(keys)
    assert client.get(keys) == data  # from a again


def test_a_damaged_object_is_dropped_by_its_owner(cluster, eventually):
    a = cluster.node("a")
    keys, data = blocks(2)
    cluster.client(a).put(keys, data, PART)
    cluster.settle()
    with a.node.lease(keys) as lease:
        offset = lease.offset(1)
        lease.crcs(1)  # else they are computed in the background, of damaged bytes
    a.node._buffer.array[offset] ^= 1
    client = cluster.client()
    assert client.get(keys) == [data[0], None]
    assert client.counters()["corrupt"] == 1
    assert a.node.exists(keys) == [True, False]
    eventually(lambda: client.replica.holders(keys) == [["a"], []])


def test_a_dead_writers_keys_can_be_put_after_its_lease(cluster, eventually):
    a = cluster.node("a", num_slots=2, lease_seconds=0.3)
    stub = Stub(a.server.address, m.NODE)
    keys, data = blocks(2)
    reply = stub.reserve(m.NodeReserve(a.node.epoch, keys, NBYTES, NBYTES))
    client = cluster.client()
    assert client.put(keys[:1], data[:1]) == ["writing"]
    assert client.get(keys) == [None, None]
    eventually(lambda: client.put(keys, data) == ["stored", "stored"])
    items = [m.CommitItem(0, [0])]
    with pytest.raises(StaleError, match="not under write"):
        stub.commit(m.CommitRequest(a.node.epoch, reply.handle, items))
    assert client.get(keys) == data
    stub.close()


def test_a_write_that_breaks_gives_its_slots_back(cluster):
    nodes = [cluster.node(name).node for name in "ab"]
    faults = Faults(dead=True, only=lambda r: r.opcode == WRITE)
    client = cluster.client(faults=faults)
    keys, data = blocks(3)
    assert client.put(keys, data) == ["failed"] * 3
    assert client.exists(keys, fresh=True) == [False] * 3
    assert [node.stats()["reserved"] for node in nodes] == [0, 0]
    assert [node.stats()["free"] for node in nodes] == [8, 8]
    faults.dead = False
    assert client.put(keys, data) == ["stored"] * 3


@pytest.mark.parametrize("host_id", ["host-a", "elsewhere"])
def test_a_lease_reads_ranges(cluster, host_id: str):
    a = cluster.node("a")
    keys, data = blocks(3)
    cluster.client(a).put(keys[:2], data[:2], PART)
    cluster.settle()
    client = cluster.client(host_id=host_id)
    with client.lease(keys, "a") as lease:
        assert lease.held == [True, True, False]
        assert a.node.stats()["leased"] == 2
        for start, end in ((0, PART), (PART, 3 * PART), (3 * PART, NBYTES), (0, NBYTES), (17, 450)):
            into = [bytearray(end - start) for _ in range(2)]
            lease.read([1, 0], start, end - start, into)
            assert into == [data[1][start:end], data[0][start:end]]
        for indices, offset, nbytes, buffers in (
            ([2], 0, 10, [bytearray(10)]),
            ([0], 995, 10, [bytearray(10)]),
            ([0], 0, 10, [bytearray(11)]),
            ([0], 0, 10, []),
        ):
            with pytest.raises(InvalidError):
                lease.read(indices, offset, nbytes, buffers)
    assert a.node.stats()["leased"] == 0


@pytest.mark.parametrize("host_id", ["host-a", "elsewhere"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_slow_reader_never_gets_anothers_bytes(cluster, eventually, host_id: str, whole: bool):
    a = cluster.node("a", num_slots=2, lease_seconds=0.1)
    keys, data = blocks(4)
    home = cluster.client(a)
    home.put(keys[:2], data[:2], PART)
    cluster.settle()
    lease = cluster.client(host_id=host_id).lease(keys[:2], "a")
    eventually(lambda: a.node.stats()["leases"] == 0)
    nbytes = NBYTES if whole else 100
    with pytest.raises(StaleError, match="over"):
        lease.read([0], 0, nbytes, [bytearray(nbytes)])
    lease._expires = time.monotonic() + 60  # as if its clock had stood still
    lease.read([0, 1], 0, nbytes, [bytearray(nbytes) for _ in range(2)])
    assert home.put(keys[2:3], data[2:3], PART) == ["stored"]
    right = lease.try_read([0, 1], 0, nbytes, [bytearray(nbytes) for _ in range(2)])
    assert right == [a.node.exists(keys[:1])[0], a.node.exists(keys[1:2])[0]]
    assert right.count(False) == 1
    with a.node.reserve(keys[3:], NBYTES, PART):
        assert lease.try_read([0, 1], 0, 100, [bytearray(100) for _ in range(2)]) == [False, False]
    lease.close()


def test_views_are_the_owners_bytes_in_place(cluster):
    a = cluster.node("a")
    keys, data = blocks(3)
    cluster.client(a).put(keys[:2], data[:2], PART)
    cluster.settle()
    with cluster.client(host_id="host-a").lease(keys, "a") as lease:
        with lease.views([1, 0]) as views:
            assert [bytes(view) for view in views] == [data[1], data[0]]
            assert all(view.readonly for view in views)
            where = np.frombuffer(a.node._store.view(a.node._store._pool.find(keys[1])), np.uint8)
            where[3] ^= 1  # no other way to see that it is the same memory
            assert views[0][3] == data[1][3] ^ 1
            where[3] ^= 1
        with pytest.raises(InvalidError, match="not held"), lease.views([2]):
            pass
    with (
        cluster.client(host_id="elsewhere").lease(keys[:2], "a") as lease,
        pytest.raises(UnavailableError, match="host 'host-a'"),
        lease.views([0]),
    ):
        pass


def test_who_looks_at_views_for_longer_than_the_lease_is_told(cluster, eventually):
    """The reader was stopped, say; meanwhile its objects gave way to others. Both guards tell, the generations of the
    slots and the time of the lease."""
    a = cluster.node("a", num_slots=2, lease_seconds=0.1)
    keys, data = blocks(4)
    home, near = cluster.client(a), cluster.client(host_id="host-a")
    home.put(keys[:2], data[:2], PART)
    cluster.settle()
    lease = near.lease(keys[:2], "a")
    lease._expires = time.monotonic() + 600  # as if its clock stood still
    with pytest.raises(StaleError, match="not what was leased"), lease.views([0, 1]) as views:  # noqa: PT012
        assert [bytes(view) for view in views] == data[:2]
        eventually(lambda: a.node.stats()["leases"] == 0)
        assert home.put(keys[2:], data[2:], PART) == ["stored"] * 2
        assert [bytes(view) for view in views] != data[:2]
    with pytest.raises(StaleError, match="not what was leased"), lease.views([0]):
        pass
    later = near.lease(keys[2:], "a")
    later._expires = time.monotonic() + 600
    with pytest.raises(StaleError, match="is over"), later.views([0, 1]):
        later._expires = time.monotonic()
    with pytest.raises(StaleError, match="is over"), later.views([0]):
        pass
    lease.close()
    later.close()


def test_leases_of_an_unknown_and_of_a_restarted_node(cluster, eventually):
    a = cluster.node("a")
    keys, data = blocks(2)
    cluster.client(a).put(keys, data, PART)
    cluster.settle()
    far, near = cluster.client(), cluster.client(host_id="host-a")
    with pytest.raises(NotFoundError, match="nobody"):
        far.lease(keys, "nobody")
    leases = [far.lease(keys, "a"), near.lease(keys, "a")]
    old = a.node.epoch
    port = a.server.port
    a.close()
    again = cluster.node("a", port=port)
    assert again.node.epoch != old
    for lease in leases:
        with pytest.raises((StaleError, UnavailableError)):
            lease.read([0, 1], 0, NBYTES, [bytearray(NBYTES) for _ in range(2)])
        with pytest.raises(StaleError, match="epoch"):
            lease._stub.lease(m.NodeKeys(old, keys))
        lease.close()
    eventually(lambda: far.get(keys) == [None, None])
    assert cluster.client(again).put(keys, data, PART) == ["stored", "stored"]
    eventually(lambda: far.get(keys) == data)


def test_the_store_works_on_without_its_directory(cluster, eventually):
    a, b = cluster.node("a"), cluster.node("b")
    keys, data = blocks(4)
    home, other = cluster.client(a), cluster.client(b)
    home.put(keys[:2], data[:2])
    cluster.settle()
    eventually(lambda: other.get(keys[:2]) == data[:2])
    cluster.stop_directory()
    assert home.put(keys[2:], data[2:]) == ["stored", "stored"]
    assert other.get(keys) == [*data[:2], None, None]
    cluster.restart_directory()
    eventually(lambda: other.get(keys) == data)
    late = cluster.client(cluster.node("c"))
    assert late.get(keys) == data


def test_a_node_without_a_server_costs_a_miss_not_a_hang(cluster):
    a = cluster.node("a")
    client = cluster.client()
    ghost = msgspec.structs.replace(client.replica.node("a"), name="ghost", epoch=5, address="127.0.0.1:1")
    directory = Stub(cluster.address, m.DIRECTORY)
    directory.register(ghost)
    keys, data = blocks(2)
    directory.announce(m.Announce("ghost", 5, 1, keys, [], 8))
    directory.close()
    cluster.client(a).put(keys[:1], data[:1])
    cluster.settle()
    started = time.monotonic()
    assert client.get(keys) == [data[0], None]
    assert time.monotonic() - started < 10
    assert client.counters()["missed"] == 1


@pytest.mark.parametrize("lease_seconds", [1.0, 0.05])
def test_readers_and_writers_on_a_tiny_pool_never_see_wrong_bytes(cluster, lease_seconds):
    """Every object carries its key; the pool holds a quarter of the keys, so slots are rewritten often."""
    a = cluster.node("a", num_slots=6, lease_seconds=lease_seconds)
    keys, _ = blocks(24)
    home, near, far = cluster.client(a), cluster.client(host_id="host-a"), cluster.client()
    cluster.settle()
    stop, wrong, hits, errors = threading.Event(), [], [0, 0, 0], []

    def payload(key: bytes) -> bytes:
        return key * (NBYTES // 16)

    def write(client, seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            some = rng.sample(keys, 3)
            client.put(some, [payload(key) for key in some], 160)
            stop.wait(0.001)

    def read(client, number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            some = rng.sample(keys, 4)
            for key, found in zip(some, client.get(some), strict=True):
                if found is not None:
                    hits[number] += 1
                    if found != payload(key):
                        wrong.append(key)
            stop.wait(0.001)  # the reader at home needs no RPC, and would starve those who do

    def guarded(work, *args) -> None:
        try:
            work(*args)
        except StoreError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(write, client, i)) for i, client in enumerate((home, far))
    ]
    threads += [threading.Thread(target=guarded, args=(read, c, i)) for i, c in enumerate((home, near, far))]
    for thread in threads:
        thread.start()
    stop.wait(1.5)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (errors or wrong or min(hits) > 10):
        stop.wait(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert not wrong
    assert min(hits) > 10
    assert a.node.stats()["evicted"] > 100

import threading
import time

import numpy as np

from kvstore.transfer import READ, Faults, TransferRequest
from kvstore.transfer.transport import endpoint


def num_threads_to(host_id):
    return sum(thread.name == f"transfer-to-{host_id}" for thread in threading.enumerate())


def read(engine, segment, nbytes=10):
    sink = np.zeros(nbytes, np.uint8)
    engine.transfer([TransferRequest(READ, memoryview(sink), segment, 0)])
    return sink.tobytes()


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_idle_connections_are_closed_and_opened_again(make_engine, monkeypatch):
    monkeypatch.setattr(endpoint, "IDLE_SECONDS", 0.05)
    owner, engine = make_engine("far"), make_engine()
    segment = owner.register_local_memory(b"0123456789", name="m")
    for _ in range(3):
        assert read(engine, segment) == b"0123456789"
        until(lambda: num_threads_to("far") == 0)


def test_threads_per_peer_are_bounded(make_engine):
    owner, engine = make_engine("far"), make_engine(connections_per_peer=3)
    segment = owner.register_local_memory(bytes(40 << 20), name="m")
    assert num_threads_to("far") == 0
    assert read(engine, segment) == bytes(10)
    assert num_threads_to("far") == 1
    assert read(engine, segment, 40 << 20) == bytes(40 << 20)
    assert num_threads_to("far") == 3
    assert read(engine, segment, 40 << 20) == bytes(40 << 20)
    assert num_threads_to("far") == 3


def num_endpoints():
    return len({t.name for t in threading.enumerate() if t.name.startswith("transfer-to-far-")})


def owners(make_engine, number):
    return [make_engine(f"far-{i}").register_local_memory(bytes([i]) * 10, name="m") for i in range(number)]


def test_the_pool_makes_room_for_another_peer(make_engine):
    engine = make_engine(max_endpoints=2)
    segments = owners(make_engine, 5)
    for _ in range(3):
        for number, segment in enumerate(segments):
            assert read(engine, segment) == bytes([number]) * 10
            assert sum(rail.is_open for rail in engine.rails()) <= 2
        until(lambda: num_endpoints() <= 2)


def test_sieve_keeps_the_endpoint_that_is_used_again(make_engine):
    engine = make_engine(max_endpoints=2)
    hot, *cold = owners(make_engine, 5)
    read(engine, hot)
    (thread,) = (t for t in threading.enumerate() if t.name == "transfer-to-far-0")
    for segment in cold:
        read(engine, hot)
        until(lambda: not any(rail.num_in_flight for rail in engine.rails()))
        read(engine, segment)
    assert thread.is_alive()


def test_transfers_to_more_peers_than_the_pool_holds_wait_for_each_other(make_engine):
    """An endpoint with bytes in flight is never evicted: what another one waits for goes on."""
    engine = make_engine(max_endpoints=3, timeout_seconds=60)
    segments = owners(make_engine, 12)
    sinks = [bytearray(10) for _ in segments]
    batch = engine.allocate_batch_id(12)
    engine.faults = Faults(delay_seconds=0.02)
    engine.submit_transfer(
        batch,
        [TransferRequest(READ, memoryview(sink), s, 0) for sink, s in zip(sinks, segments, strict=True)],
    )
    most = 0
    while not all(engine.get_transfer_status(batch, i).state.is_final for i in range(12)):
        rails = engine.rails()
        assert all(rail.is_open for rail in rails if rail.num_in_flight)
        most = max(most, sum(rail.is_open for rail in rails))
        threading.Event().wait(0.001)
    assert {status.state for status in engine.wait(batch)} == {"COMPLETED"}
    assert [bytes(sink) for sink in sinks] == [bytes([i]) * 10 for i in range(12)]
    assert most == 3
    engine.free_batch_id(batch)

import threading
import time

import numpy as np
import pytest

from kvstore.transfer import READ, TransferError, TransferRequest
from kvstore.transfer.transport import tcp


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
    monkeypatch.setattr(tcp, "IDLE_SECONDS", 0.05)
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


def test_peers_at_one_time_are_bounded(make_engine, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_PEERS", 1)
    engine = make_engine()
    first, second = (make_engine(f"far-{i}").register_local_memory(bytes(10), name="m") for i in range(2))
    read(engine, first)
    with pytest.raises(TransferError, match="transfers to 1 peers are open: no connection to another one"):
        read(engine, second)
    assert read(engine, first) == bytes(10)


def test_an_idle_peer_makes_room_for_another(make_engine, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_PEERS", 1)
    monkeypatch.setattr(tcp, "IDLE_SECONDS", 0.05)
    engine = make_engine()
    for number in range(3):
        read(engine, make_engine(f"far-{number}").register_local_memory(bytes(10), name="m"))
        until(lambda number=number: num_threads_to(f"far-{number}") == 0)

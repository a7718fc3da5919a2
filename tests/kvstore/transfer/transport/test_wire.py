import itertools
import math
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.status import OverdueError
from kvstore.transfer.transport.wire import Channel, advance, head


@given(st.lists(st.binary(max_size=5), max_size=8), st.integers(0, 40))
def test_head_and_advance_split_buffers_anywhere(parts, nbytes):
    whole = b"".join(parts)
    nbytes = min(nbytes, len(whole))
    buffers = [memoryview(part) for part in parts]
    assert b"".join(head(buffers, nbytes)) == whole[:nbytes]
    assert b"".join(advance(buffers, nbytes)) == whole[nbytes:]


@pytest.fixture
def channels(nothing_leaks):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = Channel(socket.create_connection(listener.getsockname()))
        right = Channel(listener.accept()[0])
    yield left, right
    left.close()
    right.close()


def test_a_message_larger_than_every_buffer_of_the_kernel_arrives_whole(channels):
    left, right = channels
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 12_000_000, dtype=np.uint8)
    sink = np.zeros_like(source)

    def pieces(array, count):
        cuts = np.sort(rng.integers(0, len(array), count - 1)).tolist()
        ends = [0, *cuts, len(array)]
        return [array.data[a:b] for a, b in itertools.pairwise(ends) if a < b]

    outgoing, incoming = pieces(source, 5000), pieces(sink, 3000)
    thread = threading.Thread(target=left.send, args=(outgoing, len(source), math.inf))
    thread.start()
    right.receive_into(incoming, len(sink), time.monotonic() + 60)
    thread.join(60)
    np.testing.assert_array_equal(sink, source)


def test_deadlines_hold_though_the_other_side_trickles(channels):
    left, right = channels
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.01):
            right.send([memoryview(b"x")], 1, math.inf)

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(OverdueError):
        left.receive(1_000_000, began + 0.2)
    assert 0.2 <= time.monotonic() - began < 20
    stop.set()
    thread.join(60)


def test_a_sender_to_someone_who_does_not_read_is_overdue(channels):
    left, _ = channels
    big = bytearray(64 << 20)
    with pytest.raises(OverdueError):
        left.send([memoryview(big)], len(big), time.monotonic() + 0.1)


def test_abort_wakes_a_blocked_thread(channels):
    left, _ = channels
    ended = []

    def receive():
        try:
            left.receive(1, math.inf)
        except ConnectionError as error:
            ended.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    left.abort()
    thread.join(60)
    assert len(ended) == 1
    left.close()
    left.abort()  # harmless


def test_an_idle_channel_knows_whether_it_is_still_good(channels):
    left, right = channels
    assert left.is_open()
    right.close()
    deadline = time.monotonic() + 30
    while left.is_open():
        assert time.monotonic() < deadline

"""Transfers that are awaited: the loop goes on meanwhile, and failures and deadlines are told as to a thread."""

import asyncio
import threading

import numpy as np
import pytest

from kvstore.transfer import READ, WRITE, Faults, TransferError, TransferRequest


@pytest.mark.parametrize("path", ["loopback", "shm", "tcp"])
def test_transfers_are_awaited_side_by_side(make_pair, path):
    pair = make_pair(path, 1000)
    pair.memory[:] = np.arange(1000) % 251
    sinks = [np.zeros(100, np.uint8) for _ in range(10)]

    async def read_all():
        reads = [
            pair.engine.transfer_async([TransferRequest(READ, memoryview(sink), pair.segment, 100 * i)])
            for i, sink in enumerate(sinks)
        ]
        await asyncio.gather(*reads)

    asyncio.run(read_all())
    np.testing.assert_array_equal(np.concatenate(sinks), pair.memory)


def test_a_batch_is_awaited_while_the_loop_goes_on(make_pair):
    pair = make_pair("tcp", 10, faults=Faults(delay_seconds=0.2))

    async def run():
        batch = pair.engine.allocate_batch_id(1)
        pair.engine.submit_transfer(
            batch, [TransferRequest(WRITE, memoryview(b"0123456789"), pair.segment, 0)]
        )
        waiting = asyncio.ensure_future(pair.engine.wait_async(batch))
        num_turns = 0
        while not waiting.done():
            num_turns += 1
            await asyncio.sleep(0.01)
        pair.engine.free_batch_id(batch)
        return num_turns, await waiting

    num_turns, (status,) = asyncio.run(run())
    assert (status.state, num_turns > 1) == ("COMPLETED", True)
    assert pair.memory.tobytes() == b"0123456789"


def test_failures_are_raised_and_nothing_to_do_is_done_at_once(make_pair):
    pair = make_pair("tcp", 10)

    async def run():
        await pair.engine.transfer_async([])
        with pytest.raises(TransferError, match=r"1 of 1 requests did not complete.*out of bounds"):
            await pair.engine.transfer_async(
                [TransferRequest(READ, memoryview(bytearray(5)), pair.segment, 8)]
            )

    asyncio.run(run())


def test_a_request_that_expires_in_the_queue_wakes_the_loop(make_pair):
    """Nobody else looks at the deadline of a request that no thread has taken yet."""
    pair = make_pair("tcp", 10, faults=Faults(delay_seconds=3600), connections_per_peer=1)
    request = TransferRequest(WRITE, memoryview(b"x"), pair.segment, 0)
    blocker = pair.engine.allocate_batch_id(1)
    pair.engine.submit_transfer(blocker, [request], timeout_seconds=3600)
    with pytest.raises(TransferError, match="TIMEOUT: its time was over before it started"):
        asyncio.run(asyncio.wait_for(pair.engine.transfer_async([request], timeout_seconds=0.05), 60))


def test_a_cancelled_wait_leaves_the_transfer_alone(make_pair):
    pair = make_pair("tcp", 10, faults=Faults(delay_seconds=0.1))

    async def run():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                pair.engine.transfer_async([TransferRequest(WRITE, memoryview(b"x" * 10), pair.segment, 0)]),
                0.01,
            )

    asyncio.run(run())
    while pair.engine.counters()["tcp_write"] == 0:
        threading.Event().wait(0.01)
    assert pair.memory.tobytes() == b"x" * 10

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.pacing import Pacer, TokenBucket
from kvstore.transfer.status import OverdueError


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 2)), min_size=1, max_size=50))
def test_a_sender_that_obeys_never_exceeds_rate_and_burst(sends):
    rate, burst = 100.0, 50.0
    bucket, now, log = TokenBucket(rate, burst), 0.0, []
    for nbytes, idle in sends:
        now += idle
        now += bucket.take(nbytes, now)
        log.append((now, nbytes))
    for first in range(len(log)):
        for last in range(first + 1, len(log)):
            sent_after_first = sum(nbytes for _, nbytes in log[first + 1 : last + 1])
            assert sent_after_first <= rate * (log[last][0] - log[first][0]) + burst + 1e-6


def test_a_steady_sender_gets_the_rate():
    bucket, now = TokenBucket(1000, 10), 0.0
    for _ in range(1000):
        now += bucket.take(10, now)
    assert now == pytest.approx((1000 * 10 - 10) / 1000)


def test_the_bucket_starts_full_and_refills_no_further():
    bucket = TokenBucket(100, 50)
    assert bucket.take(50, now=1000.0) == 0
    assert bucket.take(10, now=1000.0) == pytest.approx(0.1)
    assert bucket.take(50, now=5000.0) == 0
    assert bucket.take(1, now=5000.0) == pytest.approx(0.01)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1)])
def test_a_bucket_needs_a_rate_and_a_burst(rate, burst):
    with pytest.raises(ValueError, match="must be positive"):
        TokenBucket(rate, burst)


def test_a_pause_beyond_the_deadline_is_overdue_and_close_wakes_it():
    pacer = Pacer(1.0)
    with pytest.raises(OverdueError):
        pacer.pause(1000, time.monotonic() + 0.01)
    woken: list[BaseException] = []

    def sender() -> None:
        try:
            pacer.pause(1000, time.monotonic() + 3600)
        except ConnectionError as error:
            woken.append(error)

    thread = threading.Thread(target=sender)
    thread.start()
    pacer.close()
    thread.join(30)
    assert len(woken) == 1

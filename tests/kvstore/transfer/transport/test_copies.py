import threading
import time

import pytest

from kvstore.transfer.transport.copies import Copies


class Session:
    def __init__(self):
        self.aborted = threading.Event()

    def abort(self):
        self.aborted.set()


def soon():
    return time.monotonic() + 60


def test_the_earlier_copy_is_cut_off_and_has_ended_before_the_next_begins():
    copies, first, second = Copies(), Session(), Session()
    events = []

    def serve_first():
        with copies.only((1, 7), first, soon()):
            started.set()
            assert first.aborted.wait(60)
            events.append("first ends")

    started = threading.Event()
    thread = threading.Thread(target=serve_first)
    thread.start()
    assert started.wait(60)
    with copies.only((1, 7), second, soon()):
        events.append("second begins")
    thread.join()
    assert events == ["first ends", "second begins"]
    assert not second.aborted.is_set()


def test_other_frames_and_other_initiators_are_left_alone():
    copies, first = Copies(), Session()
    with copies.only((1, 7), first, soon()):
        with copies.only((1, 8), Session(), soon()), copies.only((2, 7), Session(), soon()):
            pass
        assert not first.aborted.is_set()


def test_a_copy_that_does_not_end_is_not_joined_by_another():
    copies = Copies()
    with (
        copies.only((1, 7), Session(), soon()),
        pytest.raises(ConnectionError, match="does not end"),
        copies.only((1, 7), Session(), 0.0),
    ):
        pytest.fail("two copies at a time")
    with copies.only((1, 7), Session(), soon()):
        pass

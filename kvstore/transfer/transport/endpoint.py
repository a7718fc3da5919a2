"""An endpoint: the open connections to one rail of a peer, each with a thread, opened as load asks.

It does as it is told: which frame it gets, and what becomes of one that it could not move, is decided by the
`Dispatcher` it belongs to, under whose lock all of its books are kept.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvstore.transfer.batch import Frame
from kvstore.transfer.status import TransferError
from kvstore.transfer.transport.wire import Patience

IDLE_SECONDS = 30.0  # then a connection without work is closed
PROBE_SECONDS = 1.0
log = logging.getLogger(__name__)


class Carrier(Protocol):
    """What a lane moves frames with, such as one TCP connection. One thread uses it; any may abort it."""

    def open(self, deadline: float, patience: Patience | None = None) -> None: ...
    def move(self, frame: Frame, patience: Patience | None) -> None: ...
    def close(self, broken: bool) -> None: ...
    def abort(self) -> None: ...


class Dispatcher(Protocol):
    """Who owns endpoints. All but `patience` is called with `lock` held."""

    lock: threading.Lock
    closed: threading.Event

    def patience(self, endpoint: Endpoint, frame: Frame) -> Patience | None: ...
    def ended(self, endpoint: Endpoint, frame: Frame, has_moved: bool) -> None: ...
    def probed(self, endpoint: Endpoint, error: OSError | None) -> None: ...
    def resubmit(self, endpoint: Endpoint, frame: Frame, error: OSError) -> bool: ...
    def left(self, endpoint: Endpoint) -> None: ...


class Probe(enum.Enum):
    """The job to find out whether a rail works again."""

    PROBE = enum.auto()


Job = Frame | Probe


class _Lane(threading.Thread):
    """One thread and, while it has work, one connection."""

    def __init__(self, endpoint: Endpoint, carrier: Carrier, name: str):
        super().__init__(name=name)
        self._endpoint, self._carrier = endpoint, carrier
        self._dispatcher = endpoint.dispatcher
        self._has_moved = False

    def run(self) -> None:
        while (job := self._endpoint.next_job()) is not None:
            if isinstance(job, Frame):
                self._carry(job)
            else:
                self._probe()
        self._carrier.close(broken=False)

    def _carry(self, frame: Frame) -> None:
        self._has_moved = False
        if frame.carry(self._move, self._dispatcher.closed, self._resubmit):
            with self._dispatcher.lock:
                self._dispatcher.ended(self._endpoint, frame, self._has_moved)

    def _move(self, frame: Frame) -> None:
        try:
            self._carrier.move(frame, self._dispatcher.patience(self._endpoint, frame))
        except TransferError:  # a refusal: the connection is still good
            raise
        except BaseException:
            self._carrier.close(
                broken=True
            )  # before anyone hears of it: nothing may reach its memory after that
            raise
        self._has_moved = True

    def _resubmit(self, frame: Frame, error: OSError) -> bool:
        with self._dispatcher.lock:
            return self._dispatcher.resubmit(self._endpoint, frame, error)

    def _probe(self) -> None:
        error = None
        try:
            self._carrier.open(time.monotonic() + PROBE_SECONDS)
        except OSError as problem:
            self._carrier.close(broken=True)
            error = problem
        with self._dispatcher.lock:
            self._dispatcher.probed(self._endpoint, error)

    def abort(self) -> None:
        self._carrier.abort()


class Endpoint:
    """Queue and lanes. `num_jobs` are queued or running; `is_retired`: it takes no more, lanes leave when idle."""

    def __init__(
        self, dispatcher: Dispatcher, name: str, make_carrier: Callable[[], Carrier], max_lanes: int
    ):
        self.dispatcher = dispatcher
        self.num_jobs = 0
        self.is_retired = False
        self._name, self._make_carrier, self._max_lanes = name, make_carrier, max_lanes
        self._changed = threading.Condition(dispatcher.lock)
        self._queue: deque[Job] = deque()
        self._lanes: list[_Lane] = []
        self._num_lanes = self._num_idle = 0

    @property
    def has_room(self) -> bool:
        return self.num_jobs < self._max_lanes

    @property
    def has_lanes(self) -> bool:
        return self._num_lanes > 0

    @property
    def is_alive(self) -> bool:
        """Whether a thread of it still runs."""
        return any(lane.is_alive() for lane in self._lanes)

    def give(self, job: Job) -> bool:
        """Queues a job; False if there is no thread to do it. Lock held."""
        self._queue.append(job)
        if len(self._queue) > self._num_idle and self._num_lanes < self._max_lanes:
            self._add_lane()
        if not self._num_lanes:
            self._queue.pop()
            return False
        self.num_jobs += 1
        self._changed.notify()
        return True

    def _add_lane(self) -> None:
        lane = _Lane(self, self._make_carrier(), self._name)
        try:
            lane.start()
        except RuntimeError as error:  # too many threads
            log.warning("cannot start a transfer thread: %s", error)
            return
        self._lanes = [*(lane for lane in self._lanes if lane.is_alive()), lane]
        self._num_lanes += 1

    def next_job(self) -> Job | None:
        """What to do next; None tells the lane to leave: retired, closed, or idle for `IDLE_SECONDS`."""
        closed = self.dispatcher.closed
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(
                lambda: self._queue or self.is_retired or closed.is_set(), timeout=IDLE_SECONDS
            )
            self._num_idle -= 1
            if self._queue and not closed.is_set():
                return self._queue.popleft()
            self._num_lanes -= 1
            if not self._num_lanes:
                self.dispatcher.left(self)
            return None

    def retire(self) -> list[Job]:
        """Takes no more; lanes leave when they are idle. Returns the jobs nobody has begun. Lock held."""
        self.is_retired = True
        jobs = list(self._queue)
        self.num_jobs -= len(jobs)
        self._queue.clear()
        self._changed.notify_all()
        return jobs

    def abort(self) -> None:
        """Wakes every lane out of its network call."""
        with self._changed:
            self._changed.notify_all()
            lanes = self._lanes
        for lane in lanes:
            lane.abort()

    def join(self) -> None:
        with self._changed:
            lanes = self._lanes
        for lane in lanes:
            lane.join()

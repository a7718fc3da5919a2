"""The books of a batch: which request is in which state, and the frames that carry them.

A frame is what one worker moves in one go: several requests of one submit to one segment, or a piece of a
large one. A request is final only when no frame of it runs any more: after that nobody touches its local
memory.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.transfer.request import Opcode
from kvstore.transfer.segment import DEFAULT_LOCATION, Segment
from kvstore.transfer.status import Counters, OverdueError, Path, TransferError, TransferState, TransferStatus

_STATES = list(TransferState)
_WAITING, _PENDING, _COMPLETED, _FAILED, _TIMEOUT = range(5)
EXPIRED_IN_QUEUE = "its time was over before it started"
EXPIRED_ON_ITS_WAY = "its time was over before another rail could take it"


@dataclass(slots=True, eq=False)
class Frame:
    """Byte ranges of one segment and, in the same order, the local memory they are moved from or to.

    `indices` are the requests' places in the batch; `views` flat uint8 memoryviews; `indices`, `offsets`
    and `lengths` int64 `[M]`; `deadline` is in monotonic seconds; `location` is that of the local memory. The last
    three are faults on purpose; `flip` is the byte to corrupt after a READ.
    """

    batch: Batch
    path: Path
    opcode: Opcode
    target: Segment
    permit: int
    deadline: float
    indices: np.ndarray
    views: list[memoryview]
    offsets: np.ndarray
    lengths: np.ndarray
    nbytes: int
    location: str = DEFAULT_LOCATION
    started: bool = False
    number: int = 0  # its name at the peer if it may be sent again over another rail
    tried: frozenset[int] = frozenset()  # rails that broke under it, by their place at the peer
    reason: str = ""  # why it last had to leave a rail
    delay_seconds: float = 0.0
    fail: str = ""
    flip: memoryview | None = None

    def carry(
        self,
        move: Callable[[Frame], None],
        closed: threading.Event,
        resubmit: Callable[[Frame, OSError], bool] | None = None,
    ) -> bool:
        """Runs `move` on this frame unless it has expired, and books how it ended. Never raises.

        Returns False if it has not ended: after a link's error, `resubmit` has found it another way.
        """
        if not self.batch.start(self):
            return True
        try:
            self._injected_faults(closed)
            move(self)
            if self.flip is not None:
                self.flip[0] ^= 0xFF
        except OverdueError as error:
            self.batch.end(self, _TIMEOUT, str(error))
        except Exception as error:
            if isinstance(error, OSError) and resubmit is not None and resubmit(self, error):
                return False
            self.batch.end(self, _FAILED, "the engine was closed" if closed.is_set() else _reason(error))
        else:
            self.batch.end(self, _COMPLETED)
        return True

    def refuse(self, reason: str) -> None:
        """Ends the frame, which nobody has started, as FAILED."""
        if self.batch.start(self):
            self.batch.end(self, _FAILED, reason)

    def _injected_faults(self, closed: threading.Event) -> None:
        if self.delay_seconds:
            left = self.deadline - time.monotonic()
            if closed.wait(max(0.0, min(self.delay_seconds, left))):
                raise TransferError("the engine was closed")
            if self.delay_seconds > left:
                raise OverdueError("injected fault: delayed beyond its deadline")
        if self.fail:
            raise TransferError(self.fail)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


class Batch:
    """State of up to `capacity` requests. Request `i` is the i-th submitted."""

    def __init__(self, capacity: int, counters: Counters):
        self._changed = threading.Condition()
        self._counters = counters
        self._num_requests = 0
        self._states = np.zeros(capacity, np.uint8)
        self._verdicts = np.full(capacity, _COMPLETED, np.uint8)
        self._nbytes_done = np.zeros(capacity, np.int64)
        self._frames_left = np.zeros(capacity, np.int32)
        self._resubmitted = np.zeros(capacity, np.int32)
        self._reasons: dict[int, str] = {}
        self._open: set[Frame] = set()
        self._watchers: list[Callable[[], None]] = []

    def claim(self, num_requests: int) -> int:
        """Makes room for requests; returns the index of the first. Raises ValueError if the batch is full."""
        with self._changed:
            first = self._num_requests
            if first + num_requests > len(self._states):
                raise ValueError(
                    f"batch of {len(self._states)} requests holds {first}: no room for {num_requests} more"
                )
            self._num_requests += num_requests
            return first

    def open(self, frames: list[Frame]) -> None:
        """Books frames that are about to be queued."""
        with self._changed:
            self._open.update(frames)
            for frame in frames:
                self._frames_left[frame.indices] += 1
            self._tell()

    def reject(self, indices: np.ndarray, reasons: list[str]) -> None:
        """Fails requests that no frame carries."""
        with self._changed:
            self._states[indices] = _FAILED
            self._reasons.update(zip(indices.tolist(), reasons, strict=True))
            self._tell()
        self._counters.add_failed(len(indices))

    def start(self, frame: Frame) -> bool:
        """Marks the frame as running; False if it has ended, by expiry, already."""
        with self._changed:
            self._expire(time.monotonic())
            if frame not in self._open:
                return False
            frame.started = True
            self._states[frame.indices] = _PENDING
            return True

    def suspend(self, frame: Frame) -> None:
        """Marks a running frame as queued again, for another rail: nobody touches its local memory now."""
        with self._changed:
            frame.started = False
            self._resubmitted[frame.indices] += 1
            self._counters.add_resubmitted()
            self._tell()  # whoever waits has a deadline to watch again

    def end(self, frame: Frame, verdict: int, reason: str = "") -> None:
        """Books the end of a running frame: from here on nobody touches its local memory."""
        with self._changed:
            self._end(frame, verdict, reason)

    def _end(self, frame: Frame, verdict: int, reason: str) -> None:
        self._open.discard(frame)
        indices = frame.indices
        if verdict == _COMPLETED:
            self._nbytes_done[indices] += frame.lengths
            self._counters.add_bytes(frame.path, frame.opcode, frame.nbytes)
        else:
            first_failures = indices[self._verdicts[indices] == _COMPLETED]
            self._verdicts[first_failures] = verdict
            self._reasons.update(dict.fromkeys(first_failures.tolist(), reason))
        self._frames_left[indices] -= 1
        final = indices[self._frames_left[indices] == 0]
        self._states[final] = self._verdicts[final]
        num_failed = int(np.count_nonzero(self._verdicts[final] != _COMPLETED))
        if num_failed:
            self._counters.add_failed(num_failed)
        if not self._open:
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def watch(self, watcher: Callable[[], None]) -> float | None:
        """Calls `watcher` once, when something has changed; from any thread, and it must not block.

        Returns None, and does not, if every submitted request is final; else the seconds until one may expire that
        nobody would tell of, at most infinity.
        """
        with self._changed:
            now = time.monotonic()
            if not self._in_flight(now):
                return None
            self._watchers.append(watcher)
            return min((f.deadline for f in self._open if not f.started), default=math.inf) - now

    def _expire(self, now: float) -> None:
        for frame in [f for f in self._open if not f.started and f.deadline <= now]:
            reason = f"{EXPIRED_ON_ITS_WAY}: {frame.reason}" if frame.reason else EXPIRED_IN_QUEUE
            self._end(frame, _TIMEOUT, reason)

    def status(self, index: int) -> TransferStatus:
        """Raises IndexError if no request `index` was submitted."""
        with self._changed:
            if not 0 <= index < self._num_requests:
                raise IndexError(f"request {index} of a batch that holds {self._num_requests}")
            self._expire(time.monotonic())
            return self._status(index)

    def statuses(self) -> list[TransferStatus]:
        """Of every submitted request, in order."""
        with self._changed:
            self._expire(time.monotonic())
            return [self._status(index) for index in range(self._num_requests)]

    def failures(self) -> list[tuple[int, TransferStatus]]:
        """Index and status of the requests that ended otherwise than COMPLETED."""
        with self._changed:
            return [(i, self._status(i)) for i in np.flatnonzero(self._states > _COMPLETED).tolist()]

    def _status(self, index: int) -> TransferStatus:
        return TransferStatus(
            _STATES[self._states[index]],
            int(self._nbytes_done[index]),
            self._reasons.get(index, ""),
            int(self._resubmitted[index]),
        )

    def wait(self, timeout_seconds: float | None) -> None:
        """Blocks until every submitted request is final or `timeout_seconds` have passed."""
        with self._changed:
            now = time.monotonic()
            give_up = None if timeout_seconds is None else now + timeout_seconds
            while self._in_flight(now) and (give_up is None or now < give_up):
                wakes = [frame.deadline for frame in self._open if not frame.started]
                if give_up is not None:
                    wakes.append(give_up)
                self._changed.wait(min(wakes) - now if wakes else None)
                now = time.monotonic()

    @property
    def in_flight(self) -> bool:
        with self._changed:
            return self._in_flight(time.monotonic())

    def _in_flight(self, now: float) -> bool:
        self._expire(now)
        return bool(np.any(self._states[: self._num_requests] <= _PENDING))

"""Frames that come again over another rail: at the owner of the memory, the earlier copy ends before the next begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Session(Protocol):
    def abort(self) -> None:
        """Ends what it serves, soon."""
        ...


class Copies:
    """Which session serves which frame, by (the initiator's epoch, its number for the frame)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[tuple[int, int], Session] = {}

    @contextmanager
    def only(self, frame: tuple[int, int], session: Session, deadline: float) -> Iterator[None]:
        """Held while `session` serves `frame`; one that serves it already is cut off first.

        Its rail may be dead, so that nobody else will end it: it would keep the memory, and the permit of a write.
        Raises ConnectionError if it has not ended by `deadline`, in monotonic seconds.
        """
        with self._changed:
            while (earlier := self._running.get(frame)) is not None:
                earlier.abort()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise ConnectionError("an earlier copy of this frame does not end")
            self._running[frame] = session
        try:
            yield
        finally:
            with self._changed:
                del self._running[frame]
                self._changed.notify_all()

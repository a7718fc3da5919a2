"""The directory service: `DirectoryState` behind a lock, its watch streams, a clock for silent nodes."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator

import grpc

from kvstore import messages as m
from kvstore.directory.event_log import split
from kvstore.directory.state import DirectoryState
from kvstore.errors import ExhaustedError, InvalidError, UnavailableError
from kvstore.rpc import Empty, Service

_BEATS_PER_TIMEOUT = 5
log = logging.getLogger(__name__)


class Directory:
    """Who holds what. Keeps nothing that the nodes could not tell again, so it may be restarted at any time.

    Every watcher occupies a server thread: serve it with `rpc.Server(directory.handlers(),
    max_workers=directory.max_workers)`.
    """

    def __init__(self, *, node_timeout_seconds: float = 3.0, max_watchers: int = 240):
        if node_timeout_seconds <= 0 or max_watchers < 1:
            raise InvalidError("node_timeout_seconds and max_watchers must be positive")
        self.epoch = secrets.randbits(62) + 1  # 0 is nobody's
        self.max_workers = max_watchers + 16
        self._max_watchers = max_watchers
        self._num_watchers = 0
        self._state = DirectoryState(node_timeout_seconds)
        self._changed = threading.Condition()  # guards the state; notified on every event
        self._closed = False
        self._thread = threading.Thread(target=self._forget_silent_nodes, name="directory", daemon=True)
        self._thread.start()

    def handlers(self) -> list[tuple[Service, object]]:
        """For `rpc.Server`."""
        return [(m.DIRECTORY, self)]

    def register(self, request: m.NodeInfo) -> m.RegisterReply:
        with self._changed:
            self._state.register(request, time.monotonic())
            self._changed.notify_all()
        log.info("node %s joined, epoch %x at %s", request.name, request.epoch, request.address)
        return m.RegisterReply(self._state.timeout_seconds / _BEATS_PER_TIMEOUT)

    def heartbeat(self, request: m.NodeBeat) -> m.Known:
        with self._changed:
            return m.Known(self._state.heartbeat(request, time.monotonic()))

    def announce(self, request: m.Announce) -> m.Known:
        with self._changed:
            known = self._state.announce(request, time.monotonic())
            self._changed.notify_all()
        return m.Known(known)

    def leave(self, request: m.NodeId) -> Empty:
        with self._changed:
            self._state.leave(request)
            self._changed.notify_all()
        return Empty()

    def lookup(self, request: m.LookupRequest) -> m.LookupReply:
        with self._changed:
            return self._state.lookup(request.keys)

    def nodes(self, request: Empty) -> m.NodesReply:
        with self._changed:
            return m.NodesReply(self._state.nodes())

    def watch(self, request: m.WatchRequest, context: grpc.ServicerContext) -> Iterator[m.WatchBatch]:
        """Events as they happen, an empty batch every `WATCH_BEAT_SECONDS` without any, snapshots if need be."""
        with self._changed:
            if self._num_watchers >= self._max_watchers:
                raise ExhaustedError(f"the directory has {self._max_watchers} watchers already")
            self._num_watchers += 1
        context.add_callback(self._wake)
        try:
            yield from self._stream(request, context)
        finally:
            with self._changed:
                self._num_watchers -= 1

    def close(self) -> None:
        """End the streams and the clock."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _stream(self, request: m.WatchRequest, context: grpc.ServicerContext) -> Iterator[m.WatchBatch]:
        at = request.sequence if request.epoch == self.epoch else -1
        while context.is_active():
            snapshot: list[m.WatchEvent] = []
            with self._changed:
                self._changed.wait_for(
                    lambda at=at: self._closed or not context.is_active() or self._state.log.sequence != at,
                    timeout=m.WATCH_BEAT_SECONDS,
                )
                if self._closed:
                    raise UnavailableError("the directory is closing")
                events = self._state.log.since(at)
                if events is None:
                    snapshot, at = self._state.snapshot(), self._state.log.sequence
            if events is None:
                for batch in split(snapshot):
                    yield m.WatchBatch(self.epoch, at, "more", batch)
                yield m.WatchBatch(self.epoch, at, "last", [])
            else:
                at += len(events)
                yield m.WatchBatch(self.epoch, at, "", events)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _forget_silent_nodes(self) -> None:
        with self._changed:
            while not self._closed:
                for name in self._state.expire(time.monotonic()):
                    log.warning("node %s fell silent and is forgotten", name)
                    self._changed.notify_all()
                self._changed.wait(self._state.timeout_seconds / _BEATS_PER_TIMEOUT)

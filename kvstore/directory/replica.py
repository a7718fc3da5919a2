"""A local replica of the directory, kept by its watch stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvstore.directory.replica_state import ReplicaState
from kvstore.errors import StoreError
from kvstore.messages import DIRECTORY, WATCH_BEAT_SECONDS, Forgotten, Joined, NodeInfo, Tier, WatchEvent
from kvstore.rpc import Stub

_SILENT_SECONDS = 3 * WATCH_BEAT_SECONDS
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.05, 1.0
log = logging.getLogger(__name__)


class ReplicaListener(Protocol):
    """Hears every change, in order, on the replica's thread: be quick, and do not call the replica back."""

    def on_joined(self, info: NodeInfo) -> None:
        """A node is there; it holds nothing yet."""
        ...

    def on_added(self, node: str, keys: Sequence[bytes]) -> None:
        """`node` holds `keys`; it may be known to do so, when they have changed between DRAM and SSD."""
        ...

    def on_removed(self, node: str, keys: Sequence[bytes]) -> None:
        """`node` no longer holds `keys`, some of which it may never have been known to hold."""
        ...

    def on_forgotten(self, node: str) -> None:
        """A node is gone with all it held."""
        ...


class DirectoryReplica:
    """Who holds what, answered without a call. Thread-safe.

    While `in_sync` it lags the directory by one message; a directory that falls silent is noticed after 3 s.
    Out of sync it keeps what it knew: the holders it names may be wrong, and a get through a wrong one is a
    miss.
    """

    def __init__(self, directory_address: str):
        self._stub = Stub(directory_address, DIRECTORY)
        self._state = ReplicaState()
        self._lock = threading.Condition()  # guards the state, the listeners and _heard
        self._listeners: list[ReplicaListener] = []
        # when the stream last spoke; None: no stream, or no whole snapshot yet
        self._heard: float | None = None
        self._stopped = threading.Event()
        self._replies: Any = None
        self._thread = threading.Thread(target=self._run, name="directory-replica", daemon=True)
        self._thread.start()

    @property
    def in_sync(self) -> bool:
        with self._lock:
            return self._is_in_sync()

    def _is_in_sync(self) -> bool:
        return self._heard is not None and time.monotonic() - self._heard < _SILENT_SECONDS

    def wait_in_sync(self, timeout_seconds: float) -> bool:
        """Wait for a whole snapshot; False if there is none in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._heard is not None, timeout_seconds)

    def nodes(self) -> list[NodeInfo]:
        """The nodes that are alive as far as the directory knows."""
        with self._lock:
            return list(self._state.nodes.values())

    def node(self, name: str) -> NodeInfo | None:
        with self._lock:
            return self._state.nodes.get(name)

    def held(self, keys: Sequence[bytes], *, but: str = "") -> list[bool] | None:
        """Whether some node other than `but` holds each key; None while out of sync."""
        with self._lock:
            return self._state.index.held(keys, but=but) if self._is_in_sync() else None

    def holders(self, keys: Sequence[bytes]) -> list[list[str]]:
        """The names of the nodes that hold each key."""
        with self._lock:
            return [self._state.index.holders(key) for key in keys]

    def replicas(self, keys: Sequence[bytes]) -> list[dict[str, Tier]]:
        """The names of the nodes that hold each key, and where they have it."""
        with self._lock:
            return [self._state.index.replicas(key) for key in keys]

    def keys(self, node: str) -> set[bytes]:
        """Everything that a node holds."""
        with self._lock:
            return self._state.index.keys(node)

    def lengths(self, keys: Sequence[bytes]) -> dict[str, int]:
        """See `PrefixIndex.lengths`."""
        with self._lock:
            return self._state.index.lengths(keys)

    def num_on_ssd(self, keys: Sequence[bytes], lengths: Mapping[str, int]) -> dict[str, int]:
        """See `PrefixIndex.num_on_ssd`."""
        with self._lock:
            return self._state.index.num_on_ssd(keys, lengths)

    def continued(self, keys: Sequence[bytes], lengths: Mapping[str, int]) -> int:
        """See `PrefixIndex.continued`."""
        with self._lock:
            return self._state.index.continued(keys, lengths)

    def subscribe(self, listener: ReplicaListener) -> None:
        """`listener` hears the present state at once (on this thread), then every change."""
        with self._lock:
            _tell([listener], self._state.state_events())
            self._listeners.append(listener)

    def close(self) -> None:
        """Leave the stream and join the thread."""
        self._stopped.set()
        with self._lock:
            if self._replies is not None:
                self._replies.cancel()
        self._thread.join()
        self._stub.close()

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while not self._stopped.is_set():
            try:
                for batch in self._open_stream():
                    with self._lock:
                        _tell(self._listeners, self._state.apply(batch))
                        if batch.snapshot != "more":
                            self._heard = time.monotonic()
                            self._lock.notify_all()
                    backoff = _FIRST_BACKOFF_SECONDS
            except StoreError as error:
                if not self._stopped.is_set():
                    log.warning("the directory's watch stream ended, again in %.2f s: %s", backoff, error)
            except Exception:  # a message that no directory should send must not end the replica for good
                log.exception("the directory's watch stream broke, again in %.2f s", backoff)
                with self._lock:
                    self._state.ask_for_snapshot()
            with self._lock:
                self._heard = None
                if self._replies is not None:
                    self._replies.cancel()
            self._stopped.wait(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    def _open_stream(self) -> Any:
        with self._lock:
            self._state.restart_stream()
            self._replies = self._stub.watch(self._state.position)
            if self._stopped.is_set():
                self._replies.cancel()
            return self._replies


def _tell(listeners: list[ReplicaListener], events: list[WatchEvent]) -> None:
    for event in events:
        for listener in listeners:
            try:
                _tell_one(listener, event)
            except Exception:  # its bug must not end everyone's stream
                log.exception("%r failed to hear of %s", listener, type(event).__name__)


def _tell_one(listener: ReplicaListener, event: WatchEvent) -> None:
    if isinstance(event, Joined):
        listener.on_joined(event.info)
    elif isinstance(event, Forgotten):
        listener.on_forgotten(event.name)
    else:
        if event.removed:
            listener.on_removed(event.name, event.removed)
        if event.added:
            listener.on_added(event.name, event.added)
        if event.on_ssd:
            listener.on_added(event.name, event.on_ssd)

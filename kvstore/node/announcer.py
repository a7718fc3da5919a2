"""Keeps the directory informed about one node: register, beat, announce, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time

from kvstore.errors import InvalidError, StaleError, StoreError
from kvstore.messages import DIRECTORY, MAX_BATCH_KEYS, Announce, NodeBeat, NodeId, NodeInfo
from kvstore.node.store import SlotStore
from kvstore.rpc import Stub

_BATCHING_SECONDS = 0.003  # changes that come close together travel together
_CALL_SECONDS = 2.0
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.05, 1.0
log = logging.getLogger(__name__)


class Announcer:
    """Registers `info`, then announces what `store` gains and loses until closed.

    A directory that does not know the node (it restarted, or thought it dead), or refuses what it says, makes
    it register again and announce everything. A directory that has replaced this node by another of its name
    ends the announcing.
    """

    def __init__(self, directory_address: str, info: NodeInfo, store: SlotStore):
        self._info = info
        self._store = store
        self._stub = Stub(directory_address, DIRECTORY, timeout_seconds=_CALL_SECONDS)
        self._stopped = threading.Event()
        self._told = threading.Condition()  # guards the next two
        self._asked = self._answered = 0  # calls of flush
        self._registered = False
        self._sequence = 0
        self._untold: Announce | None = None  # sent, and no answer yet
        self._beat_seconds = 0.5
        self._next_beat = 0.0
        self._thread = threading.Thread(target=self._run, name=f"announce-{info.name}", daemon=True)
        self._thread.start()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until the directory has heard of everything so far; False if it has not in time."""
        with self._told:
            self._asked += 1
            mine = self._asked
            self._store.changed.set()
            return self._told.wait_for(lambda: self._answered >= mine, timeout_seconds)

    def close(self) -> None:
        """Stop announcing and tell the directory that the node leaves."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._store.changed.set()
        self._thread.join()
        try:
            self._stub.leave(NodeId(self._info.name, self._info.epoch), timeout=0.5)
        except StoreError as error:
            log.debug("node %s left without telling the directory: %s", self._info.name, error)
        self._stub.close()

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while not self._stopped.is_set():
            try:
                self._step()
            except StaleError as error:
                log.error("node %s is no longer announced: %s", self._info.name, error)
                return
            except StoreError as error:
                log.warning("node %s was not heard, again in %.2f s: %s", self._info.name, backoff, error)
                self._registered = self._registered and not isinstance(error, InvalidError)
            except Exception:  # or the node would fall silent for good
                log.exception("node %s was not announced, again in %.2f s", self._info.name, backoff)
                self._registered = False
            else:
                backoff = _FIRST_BACKOFF_SECONDS
                continue
            self._stopped.wait(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    def _step(self) -> None:
        if not self._registered or self._store.snapshot_needed():
            self._register()
        elif self._untold is None:
            self._store.changed.wait(max(0.0, self._next_beat - time.monotonic()))
            self._stopped.wait(_BATCHING_SECONDS)
        while self._registered and not self._stopped.is_set() and self._announce_next():
            pass
        if self._registered and time.monotonic() >= self._next_beat:
            self._heard(
                self._stub.heartbeat(
                    NodeBeat(self._info.name, self._info.epoch, self._store.num_free(), self._store.draining)
                ).known
            )

    def _register(self) -> None:
        self._beat_seconds = self._stub.register(self._info).beat_seconds
        self._store.restart_changes()
        self._sequence, self._untold = 0, None
        self._heard(True)

    def _announce_next(self) -> bool:
        """Tell the next batch; False when there was nothing to tell."""
        if self._untold is None:
            with self._told:
                asked = self._asked
            news = self._store.take_changes(MAX_BATCH_KEYS)
            if not any(news):
                with self._told:
                    self._answered = asked
                    self._told.notify_all()
                return False
            self._sequence += 1
            free = self._store.num_free()
            self._untold = Announce(
                self._info.name,
                self._info.epoch,
                self._sequence,
                news.added,
                news.removed,
                free,
                news.on_ssd,
                self._store.draining,
            )
        self._heard(self._stub.announce(self._untold).known)
        self._untold = None
        return True

    def _heard(self, known: bool) -> None:
        self._registered = known
        self._next_beat = time.monotonic() + self._beat_seconds

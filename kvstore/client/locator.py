"""Where a client looks for a key, and where it puts one."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvstore.client.recent import RecentKeys
from kvstore.directory.replica import DirectoryReplica
from kvstore.errors import StoreError
from kvstore.messages import DIRECTORY, MAX_BATCH_KEYS, LookupRequest, NodeInfo, NodeLoad
from kvstore.rpc import Empty, Stub

_RECENT_SECONDS = 2.0  # by then the stream has caught up
_LOADS_SECONDS = 0.5  # how long the nodes' free slots are believed
_CALL_SECONDS = 1.0
_SUSPECT_SECONDS = 2.0  # how long a directory that did not answer is not asked again
log = logging.getLogger(__name__)


class Locator:
    """The replica of the directory, what this client knows better, and the directory for when it lags."""

    def __init__(self, directory_address: str, replica: DirectoryReplica, *, host_id: str):
        self._replica = replica
        self._host_id = host_id
        self._stub = Stub(directory_address, DIRECTORY, timeout_seconds=_CALL_SECONDS)
        self._lock = threading.Lock()  # guards the next four
        self._recent = RecentKeys(_RECENT_SECONDS)
        self._loads: list[NodeLoad] = []
        self._loads_until = 0.0
        self._silent_until = 0.0
        replica.subscribe(self)

    def holders(self, keys: Sequence[bytes]) -> list[list[NodeInfo]]:
        """Who is believed to hold each key: this host first, others in an order drawn for this call."""
        infos, names = self._names(keys)
        order = {info.name: (info.host_id != self._host_id, random.random()) for info in infos.values()}
        return [
            [infos[name] for name in sorted((n for n in some if n in infos), key=order.__getitem__)]
            for some in names
        ]

    def held(self, keys: Sequence[bytes], *, but: str) -> list[bool]:
        """Whether some node other than `but` is believed to hold each key."""
        with self._lock:
            is_known_better = self._recent.knows(keys)
        if not is_known_better and (said := self._replica.held(keys, but=but)) is not None:
            return said
        infos, names = self._names(keys)
        return [any(name != but and name in infos for name in some) for some in names]

    def note(self, key: bytes, node: str, *, present: bool, firm: bool = True) -> None:
        """This client knows of `key` on `node` before the stream says so; see `RecentKeys`."""
        with self._lock:
            self._recent.note(key, node, present=present, firm=firm, now=time.monotonic())

    def on_joined(self, info: NodeInfo) -> None:
        """Of no interest: what counts here is keys."""

    def on_added(self, node: str, keys: Sequence[bytes]) -> None:
        """A key that was found stale is there again."""
        with self._lock:
            self._recent.heard(node, keys)

    def on_removed(self, node: str, keys: Sequence[bytes]) -> None:
        """Of no interest: an older removal says nothing of a key that was put since."""

    def on_forgotten(self, node: str) -> None:
        """Of no interest: keys of unknown nodes are left out anyway."""

    def nodes(self) -> list[NodeInfo]:
        """All nodes."""
        return (
            self._replica.nodes() if self._replica.in_sync else [load.info for load in self._current_loads()]
        )

    def nodes_by_room(self) -> list[NodeInfo]:
        """All nodes that take something, the one with most free bytes first; equally free ones in any order."""
        loads = [
            (load.num_free * load.info.slot_nbytes, random.random(), load.info)
            for load in self._current_loads()
            if not load.is_draining
        ]
        return [info for _, _, info in sorted(loads, key=lambda load: load[:2], reverse=True)]

    def close(self) -> None:
        self._stub.close()

    def _names(self, keys: Sequence[bytes]) -> tuple[dict[str, NodeInfo], list[list[str]]]:
        """All nodes, and the names of those that are believed to hold each key; some may be unknown."""
        if self._replica.in_sync:
            infos = {info.name: info for info in self._replica.nodes()}
            names = self._replica.holders(keys)
        else:
            infos, names = self._lookup(keys)
        now = time.monotonic()
        with self._lock:
            return infos, [
                self._recent.correct(key, some, now) for key, some in zip(keys, names, strict=True)
            ]

    def _current_loads(self) -> list[NodeLoad]:
        with self._lock:
            if time.monotonic() < self._loads_until:
                return self._loads
        reply = self._ask("nodes", Empty())
        with self._lock:
            if reply is not None:
                self._loads, self._loads_until = reply.nodes, time.monotonic() + _LOADS_SECONDS
            return self._loads

    def _lookup(self, keys: Sequence[bytes]) -> tuple[dict[str, NodeInfo], list[list[str]]]:
        infos: dict[str, NodeInfo] = {}
        names: list[list[str]] = []
        for start in range(0, len(keys), MAX_BATCH_KEYS):
            reply = self._ask("lookup", LookupRequest(list(keys[start : start + MAX_BATCH_KEYS])))
            if reply is None:  # go by what the directory last said
                return {info.name: info for info in self._replica.nodes()}, self._replica.holders(keys)
            infos.update((info.name, info) for info in reply.nodes)
            names += [[reply.nodes[replica.node].name for replica in some] for some in reply.holders]
        return infos, names

    def _ask(self, call: str, request: Any) -> Any:
        """The directory's reply; None if it does not answer, or did not a moment ago."""
        with self._lock:
            if time.monotonic() < self._silent_until:
                return None
        try:
            return getattr(self._stub, call)(request)
        except StoreError as error:
            log.info("the directory does not answer: %s", error)
            with self._lock:
                self._silent_until = time.monotonic() + _SUSPECT_SECONDS
            return None

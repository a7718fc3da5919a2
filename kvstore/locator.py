"""Where a client looks for a key, and where it puts one."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence

from kvstore.errors import StoreError
from kvstore.messages import DIRECTORY, MAX_BATCH_KEYS, LookupRequest, NodeInfo, NodeLoad
from kvstore.recent import RecentKeys
from kvstore.rpc import Empty, Stub
from kvstore.watch import DirectoryReplica

_RECENT_SECONDS = 2.0  # by then the stream has caught up
_LOADS_SECONDS = 0.5  # how long the nodes' free slots are believed
_CALL_SECONDS = 2.0
log = logging.getLogger(__name__)


class Locator:
    """The replica of the directory, what this client knows better, and the directory itself when the
    replica is behind.
    """

    def __init__(self, directory_address: str, replica: DirectoryReplica, *, host_id: str):
        self._replica = replica
        self._host_id = host_id
        self._stub = Stub(directory_address, DIRECTORY, timeout_seconds=_CALL_SECONDS)
        self._lock = threading.Lock()  # guards the next three
        self._recent = RecentKeys(_RECENT_SECONDS)
        self._loads: list[NodeLoad] = []
        self._loads_until = 0.0

    def holders(self, keys: Sequence[bytes]) -> list[list[NodeInfo]]:
        """Who is believed to hold each key: nodes of this host first, others in an order drawn for this
        call.
        """
        if self._replica.in_sync:
            infos = {info.name: info for info in self._replica.nodes()}
            names = self._replica.holders(keys)
        else:
            infos, names = self._lookup(keys)
        order = {info.name: (info.host_id != self._host_id, random.random()) for info in infos.values()}
        now = time.monotonic()
        with self._lock:
            corrected = [self._recent.correct(key, some, now) for key, some in zip(keys, names, strict=True)]
        return [
            [infos[name] for name in sorted((n for n in some if n in infos), key=order.__getitem__)]
            for some in corrected
        ]

    def note(self, key: bytes, node: str, *, present: bool) -> None:
        """This client knows of `key` on `node` before the stream says so."""
        with self._lock:
            self._recent.note(key, node, present, time.monotonic())

    def nodes(self) -> list[NodeInfo]:
        """All nodes."""
        return (
            self._replica.nodes() if self._replica.in_sync else [load.info for load in self._current_loads()]
        )

    def nodes_by_room(self) -> list[NodeInfo]:
        """All nodes, the one with most free bytes first; equally free ones in any order."""
        loads = [
            (load.num_free * load.info.slot_nbytes, random.random(), load.info)
            for load in self._current_loads()
        ]
        return [info for _, _, info in sorted(loads, key=lambda load: load[:2], reverse=True)]

    def close(self) -> None:
        self._stub.close()

    def _current_loads(self) -> list[NodeLoad]:
        with self._lock:
            if time.monotonic() < self._loads_until:
                return self._loads
        try:
            loads = self._stub.nodes(Empty()).nodes
        except StoreError as error:
            log.info("no news of the nodes: %s", error)
            loads = self._loads
        with self._lock:
            self._loads, self._loads_until = loads, time.monotonic() + _LOADS_SECONDS
        return loads

    def _lookup(self, keys: Sequence[bytes]) -> tuple[dict[str, NodeInfo], list[list[str]]]:
        infos: dict[str, NodeInfo] = {}
        names: list[list[str]] = []
        try:
            for start in range(0, len(keys), MAX_BATCH_KEYS):
                reply = self._stub.lookup(LookupRequest(list(keys[start : start + MAX_BATCH_KEYS])))
                infos.update((info.name, info) for info in reply.nodes)
                names += [[reply.nodes[number].name for number in some] for some in reply.holders]
        except StoreError as error:
            log.info("the directory cannot be asked, going by what it last said: %s", error)
            return {info.name: info for info in self._replica.nodes()}, self._replica.holders(keys)
        return infos, names

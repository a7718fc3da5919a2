"""Connections from a client to Node services, calls to several at once, and whom to leave alone a while."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstore.errors import DeadlineError, InvalidError, StoreError, UnavailableError
from kvstore.messages import NODE, NodeInfo
from kvstore.rpc import Stub

SUSPECT_SECONDS = 1.0
_NUM_THREADS = 8
_NUM_RETIRED = 8
_T = TypeVar("_T")
log = logging.getLogger(__name__)


class Peers:
    """One stub per node name, replaced when the node's address changes. Thread-safe.

    A `ReplicaListener`: stubs of nodes that the directory has forgotten are dropped.
    """

    def __init__(self, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvstore-client")
        self._lock = threading.Lock()
        self._stubs: dict[str, Stub] = {}
        self._retired: deque[Stub] = deque()  # others may still be calling
        self._suspect_until: dict[str, float] = {}

    def stub(self, info: NodeInfo) -> Stub:
        """The connection to a node."""
        with self._lock:
            stub = self._stubs.get(info.name)
            if stub is None or stub.address != info.address:
                self._retire(info.name)
                stub = self._stubs[info.name] = Stub(
                    info.address, NODE, timeout_seconds=self._timeout_seconds
                )
            return stub

    def on_joined(self, info: NodeInfo) -> None:
        """Of no interest: its stub is made when it is called."""

    def on_added(self, node: str, keys: Sequence[bytes]) -> None:
        """Of no interest, as are removed keys."""

    on_removed = on_added

    def on_forgotten(self, node: str) -> None:
        """The node is gone, or comes back as another one."""
        with self._lock:
            self._retire(node)
            self._suspect_until.pop(node, None)

    def each(
        self, work: Sequence[tuple[NodeInfo, list[int]]], call: Callable[[NodeInfo, list[int]], _T]
    ) -> list[tuple[list[int], _T | None]]:
        """`call` every node with its item indices, at the same time; None where the node could not be asked.

        Such a node is left alone for `SUSPECT_SECONDS`: it costs one timeout, not many. Raises InvalidError
        if a call does, after all of them have ended.
        """
        if len(work) == 1:
            return [(work[0][1], self._guarded(call, *work[0]))]
        futures = [(indices, self._pool.submit(self._guarded, call, info, indices)) for info, indices in work]
        for _, future in futures:
            future.exception()
        return [(indices, future.result()) for indices, future in futures]

    def is_suspect(self, name: str) -> bool:
        """Whether the node could not be reached a moment ago."""
        with self._lock:
            return self._suspect_until.get(name, 0.0) > time.monotonic()

    def close(self) -> None:
        """Join the threads, close the connections."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for stub in (*self._stubs.values(), *self._retired):
                stub.close()
            self._stubs.clear()
            self._retired.clear()

    def _retire(self, name: str) -> None:
        stub = self._stubs.pop(name, None)
        if stub is not None:
            self._retired.append(stub)
        while len(self._retired) > _NUM_RETIRED:
            self._retired.popleft().close()

    def _guarded(
        self, call: Callable[[NodeInfo, list[int]], _T], info: NodeInfo, indices: list[int]
    ) -> _T | None:
        try:
            return call(info, indices)
        except InvalidError:
            raise
        except StoreError as error:
            log.info("node %s: %s", info.name, error)
            if isinstance(error, UnavailableError | DeadlineError):
                with self._lock:
                    self._suspect_until[info.name] = time.monotonic() + SUSPECT_SECONDS
            return None

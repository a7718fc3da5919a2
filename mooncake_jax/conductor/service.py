"""The Conductor as a gRPC service: a lock, a clock, a ticker and the prefix index around `Conductor`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.block import chain_keys, root_key
from kvstore.directory import DirectoryReplica
from kvstore.errors import UnavailableError
from kvstore.rpc import Empty, Service
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.config import ConductorConfig
from mooncake_jax.conductor.decision_log import DecisionLog, DecisionRecord
from mooncake_jax.conductor.explain import explain
from mooncake_jax.messages import (
    CONDUCTOR,
    Beat,
    ClusterInfo,
    ExplainRequest,
    Explanation,
    InstanceInfo,
    InstanceLoad,
    PlaceRequest,
    RequestEnd,
    RoleStatus,
)
from mooncake_jax.request import Placement


class PrefixSource(Protocol):
    """Who holds which blocks; thread-safe. `kvstore.directory.DirectoryReplica` is one."""

    def lengths(self, keys: Sequence[bytes]) -> dict[str, int]: ...

    def num_on_ssd(self, keys: Sequence[bytes], lengths: Mapping[str, int]) -> dict[str, int]: ...

    def continued(self, keys: Sequence[bytes], lengths: Mapping[str, int]) -> int: ...

    def close(self) -> None: ...


class _NoStore:
    def lengths(self, keys: Sequence[bytes]) -> dict[str, int]:
        return {}

    def num_on_ssd(self, keys: Sequence[bytes], lengths: Mapping[str, int]) -> dict[str, int]:
        return {}

    def continued(self, keys: Sequence[bytes], lengths: Mapping[str, int]) -> int:
        return 0

    def close(self) -> None:
        pass


class ConductorService:
    """Handlers of the `CONDUCTOR` table. `start` begins to drop what has gone silent; `close` ends that."""

    def __init__(
        self,
        config: ConductorConfig,
        prefixes: PrefixSource | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`prefixes` None: follow the directory of `config`, if it names one. The service closes them.

        Raises OSError when the decision log cannot be written.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._log = DecisionLog(
            config.schedule,
            num_records=config.num_logged_decisions,
            path=config.decision_log_path,
            max_nbytes=config.decision_log_nbytes,
        )
        self._conductor = Conductor(config, self._log)
        self._schedule = config.schedule
        self._tick_seconds = config.heartbeat_seconds / 2
        if prefixes is None:
            address = config.directory_address
            prefixes = DirectoryReplica(address) if address else _NoStore()
        self._prefixes = prefixes
        self._closing = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="conductor-tick")

    def handlers(self) -> list[tuple[Service, object]]:
        """For `kvstore.rpc.Server`."""
        return [(CONDUCTOR, self)]

    def start(self) -> None:
        """Begin to drop silent instances and bookings."""
        self._ticker.start()

    def close(self) -> None:
        """Stop the ticker, leave the directory, and close the decision log. Close the server first."""
        self._closing.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self._prefixes.close()
        with self._lock:
            self._log.close()

    def register(self, info: InstanceInfo) -> Beat:
        with self._lock:
            self._conductor.register(info, self._clock())
        return Beat(known=True)

    def heartbeat(self, load: InstanceLoad) -> Beat:
        with self._lock:
            return Beat(known=self._conductor.heartbeat(load, self._clock()))

    def place(self, call: PlaceRequest) -> Placement:
        request = call.request
        with self._lock:
            pool = self._conductor.instances.pool
        if pool is None:
            raise UnavailableError("no instance has registered yet; start a prefill and a decode instance")
        root = root_key(pool.fingerprint, request.salt)
        keys = chain_keys(root, request.tokens, pool.format.block_tokens)  # 1: PrefixHash
        # a scored prompt is computed in full: prefill reuses nothing of it
        held = {} if request.score_prompt else self._prefixes.lengths(keys)
        on_ssd = self._prefixes.num_on_ssd(keys, held)
        continued = self._prefixes.continued(keys, held)
        with self._lock:
            if self._conductor.instances.pool_fingerprint != pool.fingerprint:
                raise UnavailableError(
                    "the instances were replaced by those of another model meanwhile; try again"
                )
            return self._conductor.place(
                request,
                keys,
                held,
                on_ssd=on_ssd,
                continued=continued,
                avoid=call.avoid,
                now=self._clock(),
            )

    def end(self, end: RequestEnd) -> Empty:
        with self._lock:
            self._conductor.end(end, self._clock())
        return Empty()

    def cluster(self, _: Empty) -> ClusterInfo:
        with self._lock:
            instances = list(self._conductor.instances)
            return ClusterInfo(
                ready=self._conductor.ready,
                instances=[instance.info for instance in instances],
                loads=[instance.load for instance in instances],
                num_bookings=len(self._conductor.bookings),
                metrics=self._conductor.metrics,
            )

    def explain(self, call: ExplainRequest) -> Explanation:
        with self._lock:
            records = self._log.records()
        return explain(self._schedule, records, call.request_id)

    def status(self, _: Empty) -> RoleStatus:
        with self._lock:
            return RoleStatus(ready=self._conductor.ready, books=self._conductor.books)

    def decisions(self) -> list[DecisionRecord]:
        """The last decisions, oldest first (see `decision_log.replay`)."""
        with self._lock:
            return self._log.records()

    def _tick(self) -> None:
        while not self._closing.wait(self._tick_seconds):
            with self._lock:
                self._conductor.tick(self._clock())

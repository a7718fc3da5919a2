"""A whole cluster in one process, over real gRPC, store and transfers, with engines whose answers are known."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.engine import FakeDecodeEngine, FakePrefillEngine

from kvstore import Directory, DirectoryReplica, chain_keys, root_key
from kvstore.errors import StaleError
from kvstore.rpc import Empty, Server, Stub
from mooncake_jax.conductor.config import ConductorConfig
from mooncake_jax.conductor.service import ConductorService
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.engine.contract import DecodeEngine, PrefillEngine
from mooncake_jax.instance import EngineInstance, InstanceConfig, start_decode, start_prefill
from mooncake_jax.messages import CONDUCTOR, DECODE, PREFILL, PlaceRequest, RequestEnd
from mooncake_jax.prefill.config import PrefillConfig
from mooncake_jax.request import (
    DecodeRequest,
    FirstToken,
    Placement,
    PrefillDone,
    PrefillRequest,
    Request,
    ReserveRequest,
    StagingHandle,
    TokenEvent,
)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Polls; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not after {seconds} s: {what}"
        time.sleep(0.005)


@dataclass
class Answer:
    """What a request came to."""

    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    first: FirstToken
    done: PrefillDone
    placement: Placement


class Call:
    """One request, step by step; `cancel` from any thread ends whatever step is under way."""

    def __init__(self, cluster: LocalCluster, request: Request):
        self._cluster, self.request = cluster, request
        self._lock = threading.Lock()
        self._cancelled = False
        self._replies = None

    def place(self, avoid: Sequence[str] = ()) -> Placement:
        return self._cluster.conductor.place(PlaceRequest(self.request, list(avoid)))

    def reserve(self, placement: Placement) -> StagingHandle:
        decode = self._cluster.stub(placement.decode.address, DECODE)
        tokens = len(self.request.tokens)
        return decode.reserve(
            ReserveRequest(self.request.request_id, placement.decode.epoch, tokens, self.request.max_tokens)
        )

    def prefill(self, placement: Placement, staging: StagingHandle | None) -> tuple[FirstToken, PrefillDone]:
        stub = self._cluster.stub(placement.prefill.address, PREFILL)
        events = self._follow(stub.prefill(PrefillRequest(self.request, placement, staging)))
        first, done = events
        assert isinstance(first, FirstToken)
        assert isinstance(done, PrefillDone)
        return first, done

    def generate(self, placement: Placement, handle: StagingHandle, first_token: int) -> list[TokenEvent]:
        stub = self._cluster.stub(placement.decode.address, DECODE)
        return self._follow(stub.generate(DecodeRequest(self.request, handle, first_token)))

    def release(self, placement: Placement, handle: StagingHandle) -> None:
        with contextlib.suppress(StaleError):  # it was used, if only to fail
            self._cluster.stub(placement.decode.address, DECODE).release(handle)

    def end(self, ok: bool) -> None:
        self._cluster.conductor.end(RequestEnd(self.request.request_id, "all", ok, 0.0))

    def run(self, *, avoid: Sequence[str] = ()) -> Answer:
        """All steps."""
        placement = self.place(avoid)
        ok = False
        try:
            handle = self.reserve(placement)
            try:
                first, done = self.prefill(placement, handle)
                events = self.generate(placement, handle, first.token)
                ok = True
            finally:
                if not ok:
                    self.release(placement, handle)
        finally:
            self.end(ok)
        return Answer(
            tokens=[first.token, *(token for event in events for token in event.tokens)],
            logprobs=[first.logprob, *(logprob for event in events for logprob in event.logprobs)],
            finish=events[-1].finish,
            first=first,
            done=done,
            placement=placement,
        )

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._replies is not None:
                self._replies.cancel()

    def _follow(self, replies) -> list:
        with self._lock:
            self._replies = replies
            if self._cancelled:
                replies.cancel()
        return list(replies)


class LocalCluster:
    """Directory, Conductor, and prefill and decode instances, with fake engines unless others are given.

    `check_idle` compares all books with their start.
    """

    def __init__(
        self,
        *,
        num_prefill: int = 2,
        num_decode: int = 2,
        num_conductors: int = 1,
        host_ids: Callable[[str], str] = lambda name: name,
        prefill: PrefillConfig | None = None,
        decode: DecodeConfig | None = None,
        num_home_blocks: int = 256,
        prefill_engine: Callable[[], PrefillEngine] = FakePrefillEngine,
        decode_engine: Callable[[], DecodeEngine] = FakeDecodeEngine,
        transfer_timeout_seconds: float = 60.0,
        rate_limit_nbytes_per_second: float | None = None,
        ssd: Path | None = None,
        ssd_nbytes: int = 4_000_000,
    ):
        """`host_ids`: instance name → host id; equal ones share memory. The rate limit is each instance's.

        `ssd`: the folder in which each instance's home node has the folder of its SSD tier.
        """
        with ExitStack() as stack:
            directory = Directory()
            stack.callback(directory.close)
            directory_server = Server(directory.handlers(), max_workers=directory.max_workers)
            stack.callback(directory_server.close)
            self._replicas: list[DirectoryReplica] = []
            self.conductors: list[Stub] = []
            self._conductor_ends: list[ExitStack] = []
            for _ in range(num_conductors):
                ends = stack.enter_context(ExitStack())
                self._replicas.append(DirectoryReplica(directory_server.address))
                conductor = ConductorService(ConductorConfig(), self._replicas[-1])
                conductor.start()
                ends.callback(conductor.close)
                conductor_server = Server(conductor.handlers())
                ends.callback(conductor_server.close)
                self.conductors.append(Stub(conductor_server.address, CONDUCTOR))
                stack.callback(self.conductors[-1].close)
                self._conductor_ends.append(ends)
            self.conductor = self.conductors[0]
            self._stubs: dict[str, Stub] = {}
            self._ids = itertools.count(1)

            def config(name: str, engine: PrefillEngine | DecodeEngine) -> InstanceConfig:
                return InstanceConfig(
                    name=name,
                    model="fake",
                    directory_address=directory_server.address,
                    conductor_addresses=tuple(stub.address for stub in self.conductors),
                    host_id=host_ids(name),
                    dram_nbytes=num_home_blocks * engine.format.nbytes,
                    ssd_path="" if ssd is None else str(ssd / name),
                    ssd_nbytes=0 if ssd is None else ssd_nbytes,
                    heartbeat_seconds=0.2,
                    transfer_timeout_seconds=transfer_timeout_seconds,
                    rate_limit_nbytes_per_second=rate_limit_nbytes_per_second,
                )

            self.directory_address = directory_server.address
            self._config, self._prefill_config = config, prefill or PrefillConfig()
            self.engines: dict[str, Any] = {}
            self.instances: dict[str, EngineInstance] = {}
            for i in range(num_prefill):
                name = f"prefill-{i}"
                self.engines[name] = engine = prefill_engine()
                self.instances[name] = start_prefill(config(name, engine), engine, self._prefill_config)
                stack.callback(self.instances[name].close)
            decode = decode or DecodeConfig(staging_nbytes=1 << 20, quarantine_seconds=0.2)
            for i in range(num_decode):
                name = f"decode-{i}"
                self.engines[name] = engine = decode_engine()
                self.instances[name] = start_decode(config(name, engine), engine, decode)
                stack.callback(self.instances[name].close)
            self._replicas += [instance.client.replica for instance in self.instances.values()]
            total = num_prefill + num_decode
            for stub in self.conductors:
                wait_until(
                    lambda stub=stub: len(stub.cluster(Empty()).instances) == total, "all are registered"
                )
            self._start = {name: self.books(name) for name in self.instances}
            self._stack = stack.pop_all()

    def restart(self, name: str, engine: PrefillEngine) -> None:
        """A prefill instance ends, and a new process of that name begins, with nothing in its memory."""
        self.instances[name].close()
        self.engines[name] = engine
        self.instances[name] = start_prefill(self._config(name, engine), engine, self._prefill_config)
        self._stack.callback(self.instances[name].close)

    def stop_conductor(self, index: int) -> None:
        """It is gone, and all it knew; `conductor` is the one before it."""
        self._conductor_ends[index].close()
        del self.conductors[index]
        self.conductor = self.conductors[index - 1]

    def end(self, request_id: str) -> None:
        """Give a booking back; ids that have none are no error."""
        self.conductor.end(RequestEnd(request_id, "all", False, 0.0))

    def stub(self, address: str, table) -> Stub:
        if address not in self._stubs:
            self._stubs[address] = Stub(address, table, timeout_seconds=30.0)
        return self._stubs[address]

    def call(self, tokens: Sequence[int], max_tokens: int = 6, **fields) -> Call:
        """A request with an id of its own."""
        return Call(self, Request(f"request-{next(self._ids)}", list(tokens), max_tokens, **fields))

    def ask(
        self, tokens: Sequence[int], max_tokens: int = 6, *, avoid: Sequence[str] = (), **fields
    ) -> Answer:
        return self.call(tokens, max_tokens, **fields).run(avoid=avoid)

    def books(self, name: str) -> dict[str, float]:
        table = PREFILL if name.startswith("prefill") else DECODE
        return self.stub(self.instances[name].address, table).status(Empty()).books

    def counters(self, name: str) -> dict[str, float]:
        return self.instances[name].service.load().counters

    def keys(self, tokens: Sequence[int], node: str = "prefill-0", salt: str = "") -> list[bytes]:
        """Of the full blocks of `tokens`, as `node` names them."""
        engine = self.engines[node]
        return chain_keys(root_key(engine.fingerprint, salt), tokens, engine.format.block_tokens)

    def wait_held(self, node: str, tokens: Sequence[int], blocks: range, salt: str = "") -> None:
        """Returns when the Conductor and all instances know that `node` holds these blocks of `tokens`."""
        keys = self.keys(tokens, node, salt)[blocks.start : blocks.stop]
        assert len(keys) == len(blocks)
        for replica in self._replicas:
            wait_until(
                lambda r=replica: all(node in nodes for nodes in r.holders(keys)), f"{node} holds {blocks}"
            )

    def check_idle(self) -> None:
        """Every book is back at its start, in a generous time."""
        for name, start in self._start.items():
            wait_until(
                lambda name=name, start=start: self.books(name) == start,
                f"books of {name}: {start}, now {self.books(name)}",
            )
            self.instances[name].home.validate()
        wait_until(lambda: self.conductor.cluster(Empty()).num_bookings == 0, "no bookings are left")

    def close(self) -> None:
        for stub in self._stubs.values():
            stub.close()
        self._stack.close()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.check_idle()
        finally:
            self.close()

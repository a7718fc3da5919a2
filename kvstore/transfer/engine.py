"""The transfer engine: batches of one-sided reads and writes, each over the best path (paper, Listing 1)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from kvstore.transfer.batch import Batch, Frame
from kvstore.transfer.faults import Faults
from kvstore.transfer.guard import WriteGuard
from kvstore.transfer.orders import Order, orders
from kvstore.transfer.pacing import Pacer
from kvstore.transfer.registry import Registry
from kvstore.transfer.request import READ, Opcode, TransferRequest
from kvstore.transfer.segment import DEFAULT_LOCATION, Peer, Segment
from kvstore.transfer.status import Counters, Path, TransferError, TransferStatus
from kvstore.transfer.topology import Topology
from kvstore.transfer.transport.affinity import Affinity
from kvstore.transfer.transport.connection import TcpTransport
from kvstore.transfer.transport.copies import Copies
from kvstore.transfer.transport.loopback import LoopbackPath
from kvstore.transfer.transport.mooncake import MooncakeTransport, Upstream, UpstreamEngines
from kvstore.transfer.transport.network import (
    MAX_ENDPOINTS,
    STALL_SECONDS,
    NetworkPath,
    RailState,
    Transport,
)
from kvstore.transfer.transport.shm import SharedMemoryPath
from kvstore.transfer.transport.tcp_server import TcpServer, listen

CONNECTIONS_PER_PEER = 2
_NOWHERE = frozenset(("", "0.0.0.0", "::"))


class _Mover(Protocol):
    """A path: it takes frames, ends each of them, and fails what is left when it is closed."""

    def frame_nbytes(self, peer: Peer, total_nbytes: int) -> int: ...
    def submit(self, frames: list[Frame]) -> None: ...
    def close(self) -> None: ...


def choose_path(own: Peer, target: Segment, opcode: Opcode) -> Path:
    """The best path to a segment: its own engine's memory, then shared memory, then the network.

    A write into guarded memory of another process always takes TCP: see `WriteGuard`.
    """
    if target.peer.epoch == own.epoch:
        return "loopback"
    is_mappable = target.peer.host_id == own.host_id and bool(target.shm_path)
    is_open = opcode is READ or not target.guarded
    if is_mappable and is_open:
        return "shm"
    if own.sessions and target.peer.sessions and target.address and is_open:
        return "mooncake"
    return "tcp"


class TransferEngine:
    """Serves this process's registered memory to others, and moves bytes to and from theirs. Thread-safe.

    `peer` tells others how to reach it; `faults` may be set at any time. Its threads serve until it is
    closed.
    """

    def __init__(
        self,
        *,
        host_id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        rate_limit_nbytes_per_second: float | None = None,
        timeout_seconds: float = 10.0,
        connections_per_peer: int = CONNECTIONS_PER_PEER,
        rails: Sequence[str] = (),
        topology: Topology | None = None,
        upstream: Upstream | None = None,
        max_endpoints: int = MAX_ENDPOINTS,
        stall_seconds: float = STALL_SECONDS,
        faults: Faults | None = None,
    ):
        """Binds (host, port), an address that peers can dial; port 0 lets the OS choose.

        Args:
            host_id: engines with equal ids share /dev/shm.
            rate_limit_nbytes_per_second: cap on TCP payload that leaves here, to emulate a slower network.
            timeout_seconds: from submit to the end of a transfer, unless the call says otherwise.
            connections_per_peer: most TCP connections to one rail of a peer, each with a thread; opened as load
                asks.
            rails: addresses of this host's NICs, IPv4 or IPv6, to serve on instead of `host`; the first takes
                `port`, the others free ones.
            topology: which NICs are near which memory, of this host; peers are told. Without it every rail is as
                near as another.
            upstream: RDMA devices to use, through the upstream engine, with peers that have some.
            max_endpoints: most rails of peers with open connections; SIEVE makes room, transfers wait for it.
            stall_seconds: a rail of a peer on which nothing moves for so long is left for another of its rails.
            faults: knobs that make requests fail on purpose.

        Raises ValueError for arguments out of range, OSError if an address cannot be bound or a device not be
        used, ImportError if there is no upstream engine.
        """
        for each in rails or [host]:
            if each in _NOWHERE:
                raise ValueError(f"host {each!r}: give the address that peers dial, it is announced to them")
        if timeout_seconds <= 0 or stall_seconds <= 0 or connections_per_peer < 1 or max_endpoints < 1:
            raise ValueError(
                f"not positive: {timeout_seconds=}, {stall_seconds=}, {connections_per_peer=} or {max_endpoints=}"
            )
        self.faults = faults
        self._timeout_seconds = timeout_seconds
        self._counters = Counters()
        self._lock = threading.Lock()
        self._batches: dict[int, Batch] = {}
        self._batch_ids = itertools.count(1)
        self._closed = False
        self._pacer = None if rate_limit_nbytes_per_second is None else Pacer(rate_limit_nbytes_per_second)
        epoch = secrets.randbits(63)
        addresses = list(rails) or [host]
        self._affinity = affinity = None if topology is None else Affinity(topology)
        engines = None if upstream is None else UpstreamEngines(upstream)
        listeners = _listen(addresses, port)
        ports = [listener.getsockname()[1] for listener in listeners]
        self.peer = Peer(
            epoch,
            host_id,
            list(zip(addresses, ports, strict=True)),
            {} if affinity is None else affinity.tiers_of_addresses(addresses),
            [] if engines is None else engines.sessions,
            {} if affinity is None or engines is None else affinity.tiers_of_devices(engines.devices),
        )
        self._registry = Registry(self.peer, engines)
        transports: dict[Path, Transport] = {"tcp": TcpTransport(epoch, self._pacer, affinity)}
        if engines is not None:
            transports["mooncake"] = MooncakeTransport(epoch, engines, affinity)
        self._networks: dict[Path, NetworkPath] = {
            path: NetworkPath(
                transport, connections_per_peer, max_endpoints=max_endpoints, stall_seconds=stall_seconds
            )
            for path, transport in transports.items()
        }
        self._shm = SharedMemoryPath()
        self._movers: dict[Path, _Mover] = {"loopback": LoopbackPath(self._registry), "shm": self._shm}
        for path, network in self._networks.items():
            self._movers[path] = network
        copies = Copies()
        self._servers = [TcpServer(each, epoch, self._registry, self._pacer, copies) for each in listeners]

    def register_local_memory(
        self,
        buffer: object,
        location: str = "cpu:0",
        *,
        name: str,
        shm_path: str = "",
        guard: WriteGuard | None = None,
    ) -> Segment:
        """Lets others read and write `buffer`, C-contiguous, as `name`; a read-only one serves reads only.

        `shm_path` is the file of the `SharedBuffer` that the buffer is the whole of: processes of this host
        map it, and reach it past this engine until the SharedBuffer is closed; with a `guard` they only read
        it so, and every write is admitted here first. Raises ValueError for a taken or bad name or an unfit
        buffer, TypeError if it is none, OSError if its file is not there.
        """
        return self._registry.add(buffer, location, name, shm_path, guard)

    def unregister(self, name: str, *, wait_seconds: float = 0.0) -> None:
        """Withdraws a segment.

        Raises ValueError if there is none, TransferError if `wait_seconds` pass with transfers on it in
        flight.
        """
        self._registry.remove(name, wait_seconds)

    def allocate_batch_id(self, num_requests: int) -> int:
        """A new batch that holds up to `num_requests` requests; free it with `free_batch_id`."""
        if num_requests < 0:
            raise ValueError(f"a batch of {num_requests} requests")
        batch_id = next(self._batch_ids)
        with self._lock:
            self._batches[batch_id] = Batch(num_requests, self._counters)
        return batch_id

    def free_batch_id(self, batch_id: int) -> None:
        """Forgets a batch. Raises TransferError while it is in flight, ValueError if there is none."""
        with self._lock:
            batch = self._batches.get(batch_id)
            if batch is None:
                raise _unknown(batch_id)
            if batch.in_flight:
                raise TransferError(f"batch {batch_id} is in flight: wait for it before it is freed")
            del self._batches[batch_id]

    def submit_transfer(
        self, batch_id: int, requests: Sequence[TransferRequest], *, timeout_seconds: float | None = None
    ) -> None:
        """Starts requests and returns without waiting for the network.

        They get the batch's next indices, in order. A request that is out of its segment's bounds or whose
        peer cannot be reached ends FAILED; one not done in `timeout_seconds` (default: the engine's) ends
        TIMEOUT.

        Raises ValueError or TypeError, and starts nothing, if a request is malformed or the batch has no
        room; TransferError if the engine is closed.
        """
        self._submit(self._batch(batch_id), requests, timeout_seconds)

    def _submit(
        self, batch: Batch, requests: Sequence[TransferRequest], timeout_seconds: float | None
    ) -> None:
        if self._closed:
            raise TransferError("the transfer engine is closed")
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        submitted = orders(requests)
        first = batch.claim(len(requests))
        deadline = time.monotonic() + seconds
        for order in submitted:
            self._dispatch(batch, first, order, requests, deadline)

    def _dispatch(
        self, batch: Batch, first: int, order: Order, requests: Sequence[TransferRequest], deadline: float
    ) -> None:
        wrong, reasons = order.out_of_bounds()
        if len(wrong):
            batch.reject(order.rows[wrong] + first, reasons)
            order = order.without(wrong)
        path = choose_path(self.peer, order.target, order.opcode)
        mover = self._movers[path]
        location = DEFAULT_LOCATION
        if self._affinity is not None and order.views:
            location = self._registry.location_of(order.views[0])
        faults = self.faults
        if faults is None:
            nbytes = mover.frame_nbytes(order.target.peer, order.nbytes)
            frames = order.frames(batch, first, path, deadline, nbytes, location)
        else:
            frames = []
            for single in order.singles():
                fault = faults.decide(path, requests[single.rows[0]])
                nbytes = mover.frame_nbytes(single.target.peer, single.nbytes)
                frames += single.frames(batch, first, path, deadline, nbytes, location, fault)
        if frames:
            batch.open(frames)
            mover.submit(frames)

    def get_transfer_status(self, batch_id: int, index: int) -> TransferStatus:
        """The status of the batch's request `index`.

        Raises ValueError if there is no such batch, IndexError if there is no such request in it.
        """
        return self._batch(batch_id).status(index)

    def wait(self, batch_id: int, timeout_seconds: float | None = None) -> list[TransferStatus]:
        """Statuses, as soon as every request of the batch is final or `timeout_seconds` have passed.

        It cancels nothing. Without a timeout it returns too: each request has a deadline of its own.
        """
        batch = self._batch(batch_id)
        batch.wait(timeout_seconds)
        return batch.statuses()

    async def wait_async(self, batch_id: int) -> list[TransferStatus]:
        """`wait` for asyncio: no thread is held meanwhile. If it is cancelled, the transfers go on."""
        batch = self._batch(batch_id)
        await _until_final(batch)
        return batch.statuses()

    async def transfer_async(
        self, requests: Sequence[TransferRequest], timeout_seconds: float | None = None
    ) -> None:
        """`transfer` for asyncio. If it is cancelled, what is in flight goes on in the caller's memory until it
        has ended, at the latest at its deadline."""
        batch = Batch(len(requests), self._counters)
        self._submit(batch, requests, timeout_seconds)
        await _until_final(batch)
        _check(batch, len(requests))

    def transfer(self, requests: Sequence[TransferRequest], timeout_seconds: float | None = None) -> None:
        """Moves `requests`; returns when all bytes have arrived.

        Raises TransferError, when none of them is in flight any more, if some did not; else as
        `submit_transfer`.
        """
        batch = Batch(len(requests), self._counters)
        self._submit(batch, requests, timeout_seconds)
        batch.wait(None)
        _check(batch, len(requests))

    def view(self, target: Segment) -> memoryview:
        """The segment's bytes in place, read-only: of this engine, or shared memory of this host.

        They are the owner's, and may change: look at what says so after use, as with `RemoteLease.views`. The
        memory stays mapped for as long as the view lives. Raises TransferError for a segment that cannot be
        reached through memory, or whose owner has gone.
        """
        path = choose_path(self.peer, target, READ)
        if path == "loopback":
            with self._registry.use(target.name) as memory:
                return memory.toreadonly()
        if path == "shm":
            return self._shm.memory(target).toreadonly()
        raise TransferError(f"segment {target.name!r} is on host {target.peer.host_id!r}: read it instead")

    def counters(self) -> dict[str, int]:
        """Bytes that its requests have moved, by path and direction; "failed": how many did not complete."""
        return self._counters.snapshot()

    def rails(self) -> list[RailState]:
        """Every rail of every peer that bytes went to: is it in use, and how much has moved over it."""
        return [state for network in self._networks.values() for state in network.states()]

    def close(self) -> None:
        """Fails what is in flight, stops serving, and joins every thread. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._pacer is not None:
            self._pacer.close()
        for mover in self._movers.values():
            mover.close()
        for server in self._servers:
            server.close()
        self._registry.clear()

    def _batch(self, batch_id: int) -> Batch:
        with self._lock:
            batch = self._batches.get(batch_id)
        if batch is None:
            raise _unknown(batch_id)
        return batch


def _check(batch: Batch, num_requests: int) -> None:
    """Raises TransferError if not all of the batch has completed."""
    failures = batch.failures()
    if failures:
        index, status = failures[0]
        raise TransferError(
            f"{len(failures)} of {num_requests} requests did not complete; "
            f"request {index}: {status.state}: {status.reason}"
        )


async def _until_final(batch: Batch) -> None:
    loop = asyncio.get_running_loop()
    while True:
        changed = asyncio.Event()

        def tell(changed: asyncio.Event = changed) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
                loop.call_soon_threadsafe(changed.set)

        seconds = batch.watch(tell)
        if seconds is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), None if seconds == math.inf else max(0.0, seconds))


def _listen(addresses: list[str], port: int) -> list[socket.socket]:
    """A listener on each address, the first on `port`."""
    listeners = []
    try:
        for address in addresses:
            listeners.append(listen(address, 0 if listeners else port))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _unknown(batch_id: int) -> ValueError:
    return ValueError(f"batch {batch_id} was never allocated, or is freed")

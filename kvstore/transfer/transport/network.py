"""The network path: frames of a peer wait in one backlog, and go out on whichever of its rails should take them.

A rail has as many frames in flight as it may have connections; the next is chosen when there is room
(`rails.choose`). A frame whose rail fails or stalls goes back to the front of the backlog; the rail is avoided,
its endpoint taken down. A peer that is slow, frozen or gone holds up its own threads only. Endpoints of all
peers share one pool; SIEVE makes room in it, never at the cost of one with a frame in flight.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvstore.transfer.batch import Frame
from kvstore.transfer.rails import Candidate, Health, Verdict, choose
from kvstore.transfer.segment import Peer
from kvstore.transfer.sieve import Sieve
from kvstore.transfer.slices import frame_nbytes
from kvstore.transfer.transport.endpoint import Carrier, Endpoint, Probe
from kvstore.transfer.transport.wire import Patience, StalledError

MAX_ENDPOINTS = 256
MAX_RESTING_ROUTES = 1024  # peers remembered though nothing moves to them
STALL_SECONDS = 0.3


class Transport(Protocol):
    """How bytes go over a rail."""

    max_frame_nbytes: int

    def addresses(self, peer: Peer) -> list[tuple[str, int]]:
        """The peer's rails of this kind; the place in this list names a rail."""
        ...

    def ranks(self, peer: Peer, local: str, remote: str) -> list[int]:
        """How far each rail is from memory at these locations, lower is nearer."""
        ...

    def connect(self, peer: Peer, place: int) -> Carrier:
        """A carrier for one lane on a rail, which opens itself when it is used."""
        ...


class RailState(msgspec.Struct, frozen=True):
    """One rail of one peer as this engine knows it.

    `nbytes` have moved over it, both ways; `num_in_flight` frames are on it; `is_open`: it has an endpoint.
    """

    peer: str
    epoch: int
    address: tuple[str, int]
    is_usable: bool
    num_failures: int  # in a row
    nbytes: int
    num_in_flight: int
    is_open: bool


@dataclass(eq=False)
class _Rail:
    """The books of one rail."""

    route: _Route
    place: int
    address: tuple[str, int]
    health: Health = field(default_factory=Health)
    endpoint: Endpoint | None = None
    nbytes_in_flight: int = 0
    nbytes_moved: int = 0
    num_jobs: int = 0  # frames and probes, of retired endpoints too


class _Route:
    """The ways to one peer, and what waits to go there: a backlog for each pair of memory locations."""

    def __init__(self, peer: Peer, addresses: Sequence[tuple[str, int]]):
        self.peer = peer
        self.rails = [_Rail(self, place, address) for place, address in enumerate(addresses)]
        self.backlogs: dict[tuple[str, str], deque[Frame]] = {}
        self.ranks: dict[tuple[str, str], list[int]] = {}  # of the rails

    @property
    def is_resting(self) -> bool:
        return not any(self.backlogs.values()) and not any(r.num_jobs or r.endpoint for r in self.rails)


class NetworkPath:
    """The path to segments of other processes, wherever they are. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        connections_per_rail: int,
        *,
        max_endpoints: int = MAX_ENDPOINTS,
        stall_seconds: float = STALL_SECONDS,
    ):
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self._transport = transport
        self._connections_per_rail = connections_per_rail
        self._max_endpoints = max_endpoints
        self._stall_seconds = stall_seconds
        self._numbers = itertools.count(1)
        self._routes: dict[tuple[int, tuple[tuple[str, int], ...]], _Route] = {}
        self._rail_of: dict[Endpoint, _Rail] = {}  # of every endpoint with a thread, retired ones too
        self._leaving: list[Endpoint] = []  # their last threads are about to end
        self._pool: Sieve[_Rail] = Sieve()  # rails with an endpoint
        self._starved: dict[_Route, None] = {}  # wait for the pool, in order

    def frame_nbytes(self, peer: Peer, total_nbytes: int) -> int:
        """Largest frame for `total_nbytes` to a peer."""
        num_rails = len(self._transport.addresses(peer))
        largest = frame_nbytes(total_nbytes, self._connections_per_rail, num_rails)
        return min(largest, self._transport.max_frame_nbytes)

    def submit(self, frames: list[Frame]) -> None:
        """Queues frames, all for the same peer; returns at once."""
        peer = frames[0].target.peer
        refusal = "" if self._transport.addresses(peer) else f"peer {peer.host_id!r} has no network address"
        with self.lock:
            if self.closed.is_set():
                refusal = "the engine was closed"
            elif not refusal:
                route = self._route(peer)
                if len(route.rails) > 1:
                    for frame in frames:
                        frame.number = next(self._numbers)
                key = (frames[0].location, frames[0].target.location)
                route.backlogs.setdefault(key, deque()).extend(frames)
                self._pump(route)
        for frame in frames if refusal else ():
            frame.refuse(refusal)

    def _route(self, peer: Peer) -> _Route:
        addresses = self._transport.addresses(peer)
        key = (peer.epoch, tuple(addresses))
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= MAX_RESTING_ROUTES:
                self._routes = {k: route for k, route in self._routes.items() if not route.is_resting}
            route = self._routes[key] = _Route(peer, addresses)
        return route

    def _pump(self, route: _Route) -> None:
        """Places as much of the backlog as there is room for."""
        if self.closed.is_set():
            return
        self._probe(route)
        for backlog in route.backlogs.values():
            while backlog:
                verdict = self._choose(route, backlog[0])
                if verdict is Verdict.WAIT:
                    if len(self._pool) >= self._max_endpoints:
                        self._starved[route] = None
                    break
                frame = backlog.popleft()
                if verdict is Verdict.NOWHERE:
                    frame.refuse(frame.reason)
                elif not self._give(route.rails[verdict], frame):
                    frame.refuse("this process has no more threads")

    def _choose(self, route: _Route, frame: Frame) -> int | Verdict:
        ranks = route.ranks.get(_locations(frame))
        if ranks is None:
            ranks = route.ranks[_locations(frame)] = self._transport.ranks(route.peer, *_locations(frame))
        return choose(
            [
                Candidate(
                    ranks[rail.place],
                    rail.nbytes_in_flight,
                    rail.health.is_usable,
                    self._has_room(rail),
                    rail.place in frame.tried,
                )
                for rail in route.rails
            ]
        )

    def _has_room(self, rail: _Rail) -> bool:
        if rail.endpoint is not None:
            return rail.endpoint.has_room
        return len(self._pool) < self._max_endpoints or any(map(_may_leave, self._pool))

    def _give(self, rail: _Rail, job: Frame | Probe) -> bool:
        """Hands a job to the rail's endpoint, a new one if need be; there is room. False without a thread."""
        if rail.endpoint is not None:
            self._pool.use(rail)
        endpoint = rail.endpoint or self._open(rail)
        if not endpoint.give(job):
            self._take_down(endpoint)
            return False
        rail.num_jobs += 1
        if isinstance(job, Frame):
            rail.nbytes_in_flight += job.nbytes
        return True

    def _open(self, rail: _Rail) -> Endpoint:
        if len(self._pool) >= self._max_endpoints:
            victim = self._pool.evict(_may_leave)
            assert victim is not None
            assert victim.endpoint is not None
            self._take_down(victim.endpoint)
        peer, place = rail.route.peer, rail.place
        rail.endpoint = endpoint = Endpoint(
            self,
            f"transfer-to-{peer.host_id}",
            lambda: self._transport.connect(peer, place),
            self._connections_per_rail,
        )
        self._rail_of[endpoint] = rail
        self._pool.add(rail)
        return endpoint

    def _take_down(self, endpoint: Endpoint) -> None:
        """Out of the pool; its connections close when they have ended what they carry."""
        rail = self._rail_of[endpoint]
        if rail.endpoint is not endpoint:
            return
        rail.endpoint = None
        if rail in self._pool:
            self._pool.remove(rail)
        for job in endpoint.retire():
            self._release(rail, job)
            if isinstance(job, Frame):
                rail.route.backlogs[_locations(job)].appendleft(job)
            else:
                rail.health.is_probing = False
        if not endpoint.has_lanes:
            del self._rail_of[endpoint]

    def _release(self, rail: _Rail, job: Frame | Probe) -> None:
        rail.num_jobs -= 1
        if isinstance(job, Frame):
            rail.nbytes_in_flight -= job.nbytes

    def _probe(self, route: _Route) -> None:
        """Looks after avoided rails whose cooldown is over. A peer's only rail is probed by the frames themselves."""
        if len(route.rails) < 2:
            return
        now = time.monotonic()
        for rail in route.rails:
            if rail.health.wants_probe(now) and self._has_room(rail):
                rail.health.is_probing = self._give(rail, Probe.PROBE)

    def patience(self, endpoint: Endpoint, frame: Frame) -> Patience | None:
        """None for a peer with one rail. It is shorter for a frame that has little time."""
        rail = self._rail_of[endpoint]
        if len(rail.route.rails) < 2:
            return None
        left = frame.deadline - time.monotonic()
        return Patience(min(self._stall_seconds, max(0.01, left / 2)), lambda: self._may_leave(rail))

    def _may_leave(self, rail: _Rail) -> bool:
        with self.lock:
            self._probe(rail.route)
            return any(other.health.is_usable for other in rail.route.rails if other is not rail)

    def ended(self, endpoint: Endpoint, frame: Frame, has_moved: bool) -> None:
        """A frame is final."""
        rail = self._rail_of[endpoint]
        self._finish(endpoint, frame)
        if has_moved:
            rail.nbytes_moved += frame.nbytes
            if not endpoint.is_retired:
                rail.health.recover()
        self._advance(rail)

    def probed(self, endpoint: Endpoint, error: OSError | None) -> None:
        """A probe has come through, or ended with an error."""
        rail = self._rail_of[endpoint]
        self._finish(endpoint, Probe.PROBE)
        if error is not None:
            self._fail(endpoint)
        elif not endpoint.is_retired:
            rail.health.recover()
        else:
            rail.health.is_probing = False
        self._advance(rail)

    def resubmit(self, endpoint: Endpoint, frame: Frame, error: OSError) -> bool:
        """Puts a frame whose rail has failed back in front of the backlog; False if no rail is left for it."""
        rail = self._rail_of[endpoint]
        self._fail(endpoint)
        if not isinstance(error, StalledError):  # a rail that was too slow is better than none
            frame.tried |= {rail.place}
        frame.reason = str(error) or type(error).__name__
        if self.closed.is_set() or self._choose(rail.route, frame) is Verdict.NOWHERE:
            return False
        self._finish(endpoint, frame)
        frame.batch.suspend(frame)
        rail.route.backlogs[_locations(frame)].appendleft(frame)
        self._advance(rail)
        return True

    def _fail(self, endpoint: Endpoint) -> None:
        rail = self._rail_of[endpoint]
        if not endpoint.is_retired or rail.health.is_probing:
            rail.health.fail(time.monotonic())
        self._take_down(endpoint)

    def _finish(self, endpoint: Endpoint, job: Frame | Probe) -> None:
        endpoint.num_jobs -= 1
        self._release(self._rail_of[endpoint], job)

    def _advance(self, rail: _Rail) -> None:
        if self._starved and (not rail.num_jobs or len(self._pool) < self._max_endpoints):
            starved, self._starved = self._starved, {}
            for route in starved:
                self._pump(route)
        self._pump(rail.route)

    def left(self, endpoint: Endpoint) -> None:
        """Its last lane has left."""
        rail = self._rail_of[endpoint]
        self._take_down(endpoint)
        self._rail_of.pop(endpoint, None)
        self._leaving = [each for each in self._leaving if each.is_alive]
        self._leaving.append(endpoint)
        self._advance(rail)

    def states(self) -> list[RailState]:
        """Of every rail of every peer that is remembered."""
        with self.lock:
            return [
                RailState(
                    route.peer.host_id,
                    route.peer.epoch,
                    rail.address,
                    rail.health.is_usable,
                    rail.health.num_failures,
                    rail.nbytes_moved,
                    rail.num_jobs,
                    rail.endpoint is not None,
                )
                for route in self._routes.values()
                for rail in route.rails
            ]

    def close(self) -> None:
        """Fails what is in flight and joins every thread."""
        with self.lock:
            self.closed.set()
            endpoints = [*self._rail_of, *self._leaving]
            jobs = [job for endpoint in endpoints for job in endpoint.retire()]
            frames = [job for job in jobs if isinstance(job, Frame)]
            for route in self._routes.values():
                for backlog in route.backlogs.values():
                    frames += backlog
                    backlog.clear()
        for endpoint in endpoints:
            endpoint.abort()
        for frame in frames:
            frame.refuse("the engine was closed")
        for endpoint in endpoints:
            endpoint.join()


def _locations(frame: Frame) -> tuple[str, str]:
    return frame.location, frame.target.location


def _may_leave(rail: _Rail) -> bool:
    return not rail.num_jobs

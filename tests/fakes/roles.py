"""A Conductor, prefill and decode instances behind real RPC, whose answer to prompt [.., n] is n+1, n+2, …

Every call can be told to wait at a gate or to fail, and everything taken is in `books`.
"""

from __future__ import annotations

import threading
from collections import Counter

from kvstore.block import BlockFormat
from kvstore.errors import ExhaustedError, StaleError, StoreError, UnavailableError
from kvstore.rpc import Empty, Server
from kvstore.transfer.segment import Peer, Segment
from mooncake_jax.messages import CONDUCTOR, DECODE, PREFILL, ClusterInfo, InstanceInfo, InstanceLoad
from mooncake_jax.request import (
    FirstToken,
    Instance,
    Placement,
    PrefillDone,
    StagingHandle,
    TokenEvent,
)

SEGMENT = Segment(Peer(1, "host", []), "staging", 1 << 20)
FORMAT = BlockFormat(1, 1, 2, 16, "float32", 1)


class Gates:
    """Named points where a call waits, or fails: `fail["prefill.start"] = [error, …]`, each error once."""

    def __init__(self):
        self.hold: set[str] = set()
        self.fail: dict[str, list[StoreError]] = {}
        self.reached: dict[str, threading.Event] = {}
        self.released = threading.Event()

    def at(self, name, context=None):
        self.reached.setdefault(name, threading.Event()).set()
        if self.fail.get(name):
            raise self.fail[name].pop(0)
        while name in self.hold and not self.released.wait(0.005):
            if context is not None and not context.is_active():
                return False
        return True

    def wait_for(self, name, seconds=10):
        assert self.reached.setdefault(name, threading.Event()).wait(seconds), f"never reached {name}"


class FakeRoles:
    """One Conductor, `num_prefill` prefill and `num_decode` decode instances, each a server of its own."""

    def __init__(self, num_prefill=2, num_decode=1, *, eos=None):
        self.gates, self.eos = Gates(), eos
        self.bookings: dict[str, set[str]] = {}
        self.staged: dict[int, str] = {}
        self.streams = Counter()  # open ones
        self.calls: list[tuple] = []
        self._generation = 0
        self._lock = threading.Lock()
        self._servers = []
        self.prefills = [self._serve(PREFILL, f"prefill-{i}", FakePrefill) for i in range(num_prefill)]
        self.decodes = [self._serve(DECODE, f"decode-{i}", FakeDecode) for i in range(num_decode)]
        self._servers.append(Server([(CONDUCTOR, self)]))
        self.address = self._servers[-1].address

    def _serve(self, service, name, kind):
        handler = kind(self, name)
        server = Server([(service, handler)])
        self._servers.append(server)
        handler.server = server
        return Instance(name, server.address, len(self._servers))

    @property
    def books(self):
        with self._lock:
            return {
                "bookings": len(self.bookings),
                "staged": len(self.staged),
                "streams": sum(self.streams.values()),
            }

    def close(self):
        self.gates.released.set()
        for server in self._servers:
            server.close()

    def stop(self, name):
        """As if the process had died."""
        index = [i.name for i in (*self.prefills, *self.decodes)].index(name)
        self._servers[index].close(0)

    # the Conductor's calls

    def place(self, request):
        self.gates.at("place")
        with self._lock:
            prefill = [i for i in self.prefills if i.name not in request.avoid]
            decode = [i for i in self.decodes if i.name not in request.avoid]
            if not prefill or not decode:
                raise UnavailableError("no instance left")
            self.calls.append(("place", tuple(request.avoid)))
            assert request.request.request_id not in self.bookings, "booked twice"
            self.bookings[request.request.request_id] = {"prefill", "decode"}
        return Placement(request.request.request_id, prefill[0], decode[0], [], 0, 0, "", 0.1, 0.01)

    def end(self, request):
        self.calls.append(("end", request.phase, request.ok))
        with self._lock:
            phases = self.bookings.get(request.request_id, set())
            phases -= {"prefill", "decode"} if request.phase == "all" else {request.phase}
            if not phases:
                self.bookings.pop(request.request_id, None)
        return Empty()

    def cluster(self, _):
        self.gates.at("cluster")
        infos = [self._info(i, "prefill", 120) for i in self.prefills]
        infos += [self._info(i, "decode", 100) for i in self.decodes]
        counters = {"tcp_read": 7.0, "shm_write": 5.0, "compiles_after_ready": 0.0}
        loads = [InstanceLoad(i.instance.name, 1, [], 0, 1, 0, 2.0, counters) for i in infos]
        return ClusterInfo(True, infos, loads, len(self.bookings))

    def _info(self, instance, role, max_tokens):
        return InstanceInfo(instance, role, "fake", b"f", FORMAT, max_tokens, "node", "host", 2, 1000)

    def register(self, _):
        raise NotImplementedError

    heartbeat = status = explain = register


class FakePrefill:
    def __init__(self, roles, name):
        self.roles, self.name = roles, name

    def prefill(self, request, context):
        roles = self.roles
        roles.calls.append(("prefill", self.name, request.staging is not None))
        roles.streams["prefill"] += 1
        try:
            if not roles.gates.at("prefill.start", context):
                return
            yield FirstToken(request.request.tokens[-1] + 1, -0.25, 4, 2)
            if not roles.gates.at("prefill.done", context):
                return
            yield PrefillDone(0.1, 0.2, 0.0, 10)
        finally:
            roles.streams["prefill"] -= 1

    def status(self, _):
        raise NotImplementedError


class FakeDecode:
    def __init__(self, roles, name):
        self.roles, self.name = roles, name

    def reserve(self, request):
        roles = self.roles
        roles.gates.at("reserve")
        with roles._lock:
            roles._generation += 1
            roles.staged[roles._generation] = request.request_id
            roles.calls.append(("reserve", self.name))
            return StagingHandle(self.name, request.epoch, 0, roles._generation, SEGMENT, 0, 1, 60.0)

    def release(self, handle):
        with self.roles._lock:
            if self.roles.staged.pop(handle.generation, None) is None:
                raise StaleError("no such reservation")
            self.roles.calls.append(("release", self.name))
        return Empty()

    def generate(self, request, context):
        roles = self.roles
        with roles._lock:
            if roles.staged.pop(request.handle.generation, None) is None:
                raise StaleError("no such reservation")
        roles.streams["decode"] += 1
        try:
            if not roles.gates.at("decode.start", context):
                return
            token, left = request.first_token, request.request.max_tokens - 1
            while left:
                token, left = token + 1, left - 1
                ended = token in request.request.stop_token_ids
                reason = "stop" if ended else None if left else "length"
                yield TokenEvent([token], [-0.5], reason)
                if ended or not roles.gates.at("decode.step", context):
                    return
        finally:
            roles.streams["decode"] -= 1

    def status(self, _):
        raise NotImplementedError


def full(seconds_of_errors=1000):
    """Errors of a decode instance that stays full."""
    return [ExhaustedError("all staging is taken")] * seconds_of_errors

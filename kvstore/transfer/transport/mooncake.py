"""Rails of the upstream engine, the package `mooncake-transfer-engine`: RDMA, or its TCP for tests.

One upstream engine per device, each a rail: which one carries a frame, how many are open, and where the frame goes
when one fails is decided here as for every rail; the upstream engine moves the bytes. It is addressed by the owner's
virtual addresses, and knows neither epochs nor permits: so a TCP connection to the owner stands beside every lane,
greeted and so of the right epoch, and guarded memory is written by TCP. See docs/transfer.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvstore.transfer.batch import Frame
from kvstore.transfer.buffers import address_of
from kvstore.transfer.request import READ
from kvstore.transfer.segment import Peer
from kvstore.transfer.status import OverdueError
from kvstore.transfer.transport.affinity import Affinity
from kvstore.transfer.transport.connection import Connection
from kvstore.transfer.transport.wire import Patience

SLICE_NBYTES = 16 << 10  # what the upstream engine cuts a frame into, unless MC_SLICE_SIZE says otherwise
MAX_FRAME_NBYTES = 1 << 20


@dataclass(frozen=True)
class Upstream:
    """How to start upstream engines: one per device of `devices`, such as mlx5_0, on `host`.

    `multi_nic`: one engine with all devices, whose own choice of NIC takes the place of ours.
    """

    devices: tuple[str, ...]
    host: str = "127.0.0.1"
    protocol: Literal["rdma", "tcp"] = "rdma"
    multi_nic: bool = False


class UpstreamEngines:
    """The upstream engines of this process, and the memory that is registered with all of them."""

    def __init__(self, config: Upstream):
        """Raises ImportError, which says what to install, or OSError if a device cannot be used."""
        try:
            module = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ImportError(
                f"the upstream engine cannot be loaded: pip install 'mooncake-jax[rdma]' ({error})"
            ) from error
        os.environ.setdefault("MC_SLICE_SIZE", str(SLICE_NBYTES))
        self.devices = (",".join(config.devices),) if config.multi_nic else config.devices
        self._lock = threading.Lock()
        self._users: dict[tuple[int, int], int] = {}
        self._engines: list[Any] = []
        for device in self.devices:
            engine = module.TransferEngine()
            if engine.initialize(config.host, "P2PHANDSHAKE", config.protocol, device):
                raise OSError(f"the upstream engine cannot use device {device!r} by {config.protocol}")
            self._engines.append(engine)
        self.sessions = [(config.host, engine.get_rpc_port()) for engine in self._engines]

    def register(self, view: memoryview) -> None:
        """Lets every device reach `view`, until `unregister` was called as often. Raises OSError."""
        with self._lock:
            self._add((address_of(view), len(view)))

    def unregister(self, view: memoryview) -> None:
        with self._lock:
            self._drop((address_of(view), len(view)))

    @contextlib.contextmanager
    def hold(self, views: list[memoryview]) -> Iterator[None]:
        """Local memory of a frame, which stays registered meanwhile: by what it lies in, or by itself."""
        held: list[tuple[int, int]] = []
        try:
            for view in views:
                with self._lock:
                    key = self._around(view)
                    self._add(key)
                held.append(key)
            yield
        finally:
            with self._lock:
                for key in held:
                    self._drop(key)

    def _around(self, view: memoryview) -> tuple[int, int]:
        """The registered memory in which `view` lies; itself if there is none."""
        start, nbytes = address_of(view), len(view)
        around = (key for key in self._users if key[0] <= start and start + nbytes <= sum(key))
        return next(around, (start, nbytes))

    def _add(self, key: tuple[int, int]) -> None:
        if not self._users.get(key) and key[1]:
            for engine in self._engines:
                if engine.register_memory(*key):
                    raise OSError(f"the upstream engine cannot register {key[1]} bytes at {key[0]:#x}")
        self._users[key] = self._users.get(key, 0) + 1

    def _drop(self, key: tuple[int, int]) -> None:
        self._users[key] -= 1
        if self._users[key]:
            return
        del self._users[key]
        for engine in self._engines if key[1] else ():
            engine.unregister_memory(key[0])

    def move(self, place: int, session: tuple[str, int], frame: Frame) -> int:
        """Moves a frame with one engine; returns its status, 0 if all is well. Blocks until it has ended."""
        engine = self._engines[place % len(self._engines)]
        call = engine.batch_transfer_sync_read if frame.opcode is READ else engine.batch_transfer_sync_write
        locals_ = [address_of(view) for view in frame.views if len(view)]
        remotes = (frame.offsets[frame.lengths > 0] + frame.target.address).tolist()
        return call(f"{session[0]}:{session[1]}", locals_, remotes, frame.lengths[frame.lengths > 0].tolist())


class MooncakeTransport:
    """Rails that are upstream engines of a peer; place i is reached by the own engine i, round robin."""

    max_frame_nbytes = MAX_FRAME_NBYTES

    def __init__(self, own_epoch: int, engines: UpstreamEngines, affinity: Affinity | None):
        self._own_epoch, self._engines, self._affinity = own_epoch, engines, affinity

    def addresses(self, peer: Peer) -> list[tuple[str, int]]:
        return peer.sessions

    def ranks(self, peer: Peer, local: str, remote: str) -> list[int]:
        if self._affinity is None:
            return [0] * len(peer.sessions)
        own = self._engines.devices
        ways = [own[place % len(own)] for place in range(len(peer.sessions))]
        return self._affinity.ranks(ways, peer.session_tiers, local, remote)

    def connect(self, peer: Peer, place: int) -> _Lane:
        greeted = Connection(peer, peer.rails[0], self._own_epoch, None)
        return _Lane(self._engines, place, peer.sessions[place], greeted)


class _Lane:
    """Moves a frame at a time; its connection tells that the peer still is who it was."""

    def __init__(self, engines: UpstreamEngines, place: int, session: tuple[str, int], greeted: Connection):
        self._engines, self._place, self._session, self._greeted = engines, place, session, greeted

    def open(self, deadline: float, patience: Patience | None = None) -> None:
        self._greeted.open(deadline, patience)

    def move(self, frame: Frame, patience: Patience | None) -> None:
        """Raises ConnectionError if the upstream engine could not.

        A call into it cannot be cut short: the frame ends when it returns, by its own time limits.
        """
        self.open(frame.deadline, patience)
        if frame.deadline <= time.monotonic():
            raise OverdueError("no time was left when the peer had answered")
        with self._engines.hold([view for view in frame.views if len(view)]):
            status = self._engines.move(self._place, self._session, frame)
        if status:
            host, port = self._session
            raise ConnectionError(f"the upstream engine's status is {status} for {host}:{port}")

    def close(self, broken: bool) -> None:
        self._greeted.close(broken)

    def abort(self) -> None:
        self._greeted.abort()

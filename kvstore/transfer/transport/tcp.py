"""TCP, the initiator's side: per peer a queue of frames and a few threads, each with its own connection.

A peer that is slow, frozen or gone holds up its own threads only.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque

from kvstore.transfer.batch import Frame
from kvstore.transfer.pacing import Pacer
from kvstore.transfer.request import READ
from kvstore.transfer.segment import Peer
from kvstore.transfer.status import OverdueError
from kvstore.transfer.transport import wire

IDLE_SECONDS = 30.0  # then a connection without work is closed
MAX_PEERS = 256
log = logging.getLogger(__name__)


class _Lane(threading.Thread):
    """One thread and, while it has work, one connection to the peer of its link."""

    def __init__(self, link: _Link):
        super().__init__(name=f"transfer-to-{link.peer.host_id}")
        self._link = link
        self._channel: wire.Channel | None = None

    def run(self) -> None:
        while (frame := self._link.next_frame()) is not None:
            frame.carry(self._move, self._link.closed)
        self._drop()

    def abort(self) -> None:
        """Wakes the thread out of whatever network call it is in."""
        channel = self._channel
        if channel is not None:
            channel.abort()

    def _move(self, frame: Frame) -> None:
        try:
            if self._channel is not None and not self._channel.is_open():
                self._drop()
            channel = self._channel or self._connect(frame.deadline)
            self._exchange(channel, frame)
        except wire.RefusedError:
            raise
        except BaseException:
            self._drop()  # before the frame's status is set: nothing may reach its local memory after that
            raise

    def _exchange(self, channel: wire.Channel, frame: Frame) -> None:
        left = frame.deadline - time.monotonic()
        header = memoryview(
            wire.pack_frame(
                frame.opcode,
                frame.target.name,
                frame.offsets,
                frame.lengths,
                frame.nbytes,
                left,
                frame.permit,
            )
        )
        views = frame.views if frame.lengths.all() else [view for view in frame.views if len(view)]
        if frame.opcode is READ:
            channel.send([header], len(header), frame.deadline)
            self._answer(channel, frame)
            channel.receive_into(views, frame.nbytes, frame.deadline)
        else:
            channel.send([header, *views], len(header) + frame.nbytes, frame.deadline, self._link.pacer)
            self._answer(channel, frame)

    @staticmethod
    def _answer(channel: wire.Channel, frame: Frame) -> None:
        magic, status, reason_nbytes = wire.ANSWER.unpack(channel.receive(wire.ANSWER.size, frame.deadline))
        if (
            magic != wire.ANSWER_MAGIC
            or status not in (wire.OK, wire.REFUSED)
            or reason_nbytes > wire.MAX_REASON_NBYTES
        ):
            raise wire.ProtocolError(f"the peer's answer is malformed: magic {magic:#x}, status {status}")
        reason = channel.receive(reason_nbytes, frame.deadline)
        if status == wire.REFUSED:
            raise wire.RefusedError(reason.decode(errors="replace"))

    def _connect(self, deadline: float) -> wire.Channel:
        host, port = self._link.rail
        where = f"{self._link.peer.host_id!r} at {host}:{port}"
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._channel = channel = wire.Channel(socket.socket(family, kind, protocol))
            if self._link.closed.is_set():  # looked at after the channel can be aborted
                raise ConnectionError("the engine was closed")
            channel.connect(address, deadline)
            self._greet(channel, deadline)
        except OverdueError as error:
            raise OverdueError(f"{where}: {error}") from error
        except OSError as error:
            raise ConnectionError(f"{where}: {error.strerror or error}") from error
        return channel

    def _greet(self, channel: wire.Channel, deadline: float) -> None:
        expected = self._link.peer.epoch
        hello = wire.HELLO.pack(wire.MAGIC, wire.VERSION, wire.HELLO_OK, 0, self._link.own_epoch, expected)
        channel.send([memoryview(hello)], len(hello), deadline)
        magic, version, status, _, epoch, _ = wire.HELLO.unpack(channel.receive(wire.HELLO.size, deadline))
        if magic != wire.MAGIC or version != wire.VERSION:
            raise wire.ProtocolError(f"not a transfer engine of version {wire.VERSION}")
        if epoch != expected or status != wire.HELLO_OK:
            raise ConnectionError(
                f"stale segment: its epoch {expected:016x} is over, the peer now has {epoch:016x}"
            )

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class _Link:
    """The way to one peer process over one of its rails."""

    def __init__(
        self, peer: Peer, rail: tuple[str, int], own_epoch: int, max_lanes: int, pacer: Pacer | None
    ):
        self.peer, self.rail, self.own_epoch, self.pacer = peer, rail, own_epoch, pacer
        self.closed = threading.Event()
        self._max_lanes = max_lanes
        self._changed = threading.Condition()
        self._queue: deque[Frame] = deque()
        self._lanes: list[_Lane] = []
        self._num_lanes = self._num_idle = 0

    def submit(self, frames: list[Frame]) -> None:
        with self._changed:
            self._queue.extend(frames)
            for _ in range(min(len(self._queue) - self._num_idle, self._max_lanes - self._num_lanes)):
                self._add_lane()
            self._changed.notify(len(frames))

    def _add_lane(self) -> None:
        lane = _Lane(self)
        try:
            lane.start()
        except RuntimeError as error:  # too many threads: frames wait for other lanes, or their deadline
            log.warning("cannot start a transfer thread: %s", error)
            return
        self._lanes = [*(lane for lane in self._lanes if lane.is_alive()), lane]
        self._num_lanes += 1

    def next_frame(self) -> Frame | None:
        """The next frame to move; None tells the lane to leave: closed, or idle for `IDLE_SECONDS`."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._queue or self.closed.is_set(), IDLE_SECONDS)
            self._num_idle -= 1
            if self._queue and not self.closed.is_set():
                return self._queue.popleft()
            self._num_lanes -= 1
            return None

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._num_lanes

    def close(self) -> None:
        with self._changed:
            self.closed.set()
            self._changed.notify_all()
            lanes, frames = self._lanes, list(self._queue)
            self._queue.clear()
        for lane in lanes:
            lane.abort()
        for frame in frames:
            frame.refuse("the engine was closed")
        for lane in lanes:
            lane.join()


class TcpPath:
    """The path to segments of other processes, wherever they are."""

    def __init__(self, own_epoch: int, max_lanes: int, pacer: Pacer | None):
        self.num_lanes = max_lanes
        self._own_epoch = own_epoch
        self._pacer = pacer
        self._lock = threading.Lock()
        self._links: dict[tuple[int, str, int], _Link] = {}
        self._closed = False

    def submit(self, frames: list[Frame]) -> None:
        """Queues frames, all for the same peer; returns at once."""
        peer = frames[0].target.peer
        if not peer.rails:
            for frame in frames:
                frame.refuse(f"peer {peer.host_id!r} has no network address")
            return
        with self._lock:
            refusal = "the engine was closed" if self._closed else self._queue(peer, frames)
        for frame in frames if refusal else ():
            frame.refuse(refusal)

    def _queue(self, peer: Peer, frames: list[Frame]) -> str:
        """Queues frames on the link to `peer`, a new one if need be; says why if it cannot."""
        rail = peer.rails[0]
        key = (peer.epoch, *rail)
        if key not in self._links:
            self._links = {k: link for k, link in self._links.items() if not link.is_idle}
            if len(self._links) >= MAX_PEERS:
                return f"transfers to {MAX_PEERS} peers are open: no connection to another one"
            self._links[key] = _Link(peer, rail, self._own_epoch, self.num_lanes, self._pacer)
        self._links[key].submit(frames)
        return ""

    def close(self) -> None:
        """Fails what is in flight and joins every thread."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.closed.set()
        for link in links:
            link.close()

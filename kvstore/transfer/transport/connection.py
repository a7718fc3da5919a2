"""TCP, the initiator's side of rails and their connections: greet the owner of the memory, then frames go to and fro."""

from __future__ import annotations

import socket
import time

from kvstore.transfer.batch import Frame
from kvstore.transfer.pacing import Pacer
from kvstore.transfer.request import READ
from kvstore.transfer.segment import Peer
from kvstore.transfer.slices import MAX_FRAME_NBYTES
from kvstore.transfer.status import OverdueError
from kvstore.transfer.transport import wire
from kvstore.transfer.transport.affinity import Affinity
from kvstore.transfer.transport.wire import Patience


class TcpTransport:
    """Rails that are TCP addresses, dialled by the engine of `own_epoch`; `pacer` limits what leaves on all."""

    max_frame_nbytes = MAX_FRAME_NBYTES

    def __init__(self, own_epoch: int, pacer: Pacer | None, affinity: Affinity | None):
        self._own_epoch, self._pacer, self._affinity = own_epoch, pacer, affinity

    def addresses(self, peer: Peer) -> list[tuple[str, int]]:
        return peer.rails

    def ranks(self, peer: Peer, local: str, remote: str) -> list[int]:
        if self._affinity is None or len(peer.rails) < 2:
            return [0] * len(peer.rails)
        return self._affinity.ranks(self._affinity.ways(peer), peer.tiers, local, remote)

    def connect(self, peer: Peer, place: int) -> Connection:
        return Connection(peer, peer.rails[place], self._own_epoch, self._pacer)


class Connection:
    """To `peer` at `address`, opened when it is needed. One thread uses it; any thread may `abort()` it."""

    def __init__(self, peer: Peer, address: tuple[str, int], own_epoch: int, pacer: Pacer | None):
        self._peer, self._address, self._own_epoch, self._pacer = peer, address, own_epoch, pacer
        self._channel: wire.Channel | None = None
        self._is_aborted = False

    def open(self, deadline: float, patience: Patience | None = None) -> None:
        """Connects and greets, unless that is done. Raises OverdueError, or ConnectionError with the reason."""
        if self._channel is not None and self._channel.is_open():
            return
        self.close(broken=True)
        host, port = self._address
        where = f"{self._peer.host_id!r} at {host}:{port}"
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._channel = channel = wire.Channel(socket.socket(family, kind, protocol))
            if self._is_aborted:  # looked at after the channel can be aborted
                raise ConnectionError("the engine was closed")
            channel.patience = patience
            channel.connect(address, deadline)
            self._greet(channel, deadline)
        except OverdueError as error:
            raise OverdueError(f"{where}: {error}") from error
        except wire.StalledError as error:
            raise wire.StalledError(f"{where}: {error}") from error
        except OSError as error:
            raise ConnectionError(f"{where}: {error.strerror or error}") from error

    def _greet(self, channel: wire.Channel, deadline: float) -> None:
        expected = self._peer.epoch
        hello = wire.HELLO.pack(wire.MAGIC, wire.VERSION, wire.HELLO_OK, 0, self._own_epoch, expected)
        channel.send([memoryview(hello)], len(hello), deadline)
        magic, version, status, _, epoch, _ = wire.HELLO.unpack(channel.receive(wire.HELLO.size, deadline))
        if magic != wire.MAGIC or version != wire.VERSION:
            raise wire.ProtocolError(f"not a transfer engine of version {wire.VERSION}")
        if epoch != expected or status != wire.HELLO_OK:
            raise ConnectionError(
                f"stale segment: its epoch {expected:016x} is over, the peer now has {epoch:016x}"
            )

    def move(self, frame: Frame, patience: Patience | None) -> None:
        """Moves all of the frame's bytes. Raises RefusedError, after which the connection is still good; else
        OverdueError or OSError, after which it has to be closed before the frame's end is told."""
        self.open(frame.deadline, patience)
        channel = self._channel
        assert channel is not None
        channel.patience = patience
        header = memoryview(
            wire.pack_frame(
                frame.opcode,
                frame.target.name,
                frame.offsets,
                frame.lengths,
                frame.nbytes,
                frame.deadline - time.monotonic(),
                frame.permit,
                frame.number,
            )
        )
        views = frame.views if frame.lengths.all() else [view for view in frame.views if len(view)]
        if frame.opcode is READ:
            channel.send([header], len(header), frame.deadline)
            self._answer(channel, frame)
            channel.receive_into(views, frame.nbytes, frame.deadline)
        else:
            channel.send([header, *views], len(header) + frame.nbytes, frame.deadline, self._pacer)
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

    def close(self, broken: bool) -> None:
        """Closes it; what it has not sent yet is thrown away if it is `broken`. It may be opened again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(reset=broken)

    def abort(self) -> None:
        """Wakes the thread that uses it out of whatever network call it is in, and keeps it from another."""
        self._is_aborted = True
        channel = self._channel
        if channel is not None:
            channel.abort()

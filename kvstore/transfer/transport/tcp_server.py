"""TCP, the side that owns the memory: a thread per connection serves; the application does nothing.

Nothing of a frame's payload is read or sent before its segment, bounds, limits and permit have been checked; a
payload that arrives later than its permit allows is cut off with its connection. What one
connection can make the server hold is one header, one table and one small buffer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from kvstore.transfer.pacing import Pacer
from kvstore.transfer.registry import Registry
from kvstore.transfer.request import READ, WRITE
from kvstore.transfer.slices import bounds_reason, merge_adjacent, out_of_bounds
from kvstore.transfer.status import TransferError
from kvstore.transfer.transport import wire
from kvstore.transfer.transport.copies import Copies

GREETING_SECONDS = 5.0
MAX_SERVE_SECONDS = 60.0
_DRAIN_NBYTES = 1 << 16
log = logging.getLogger(__name__)


class _Session(threading.Thread):
    """Serves one connection until the other side leaves or breaks the protocol."""

    def __init__(self, server: TcpServer, sock: socket.socket):
        super().__init__(name="transfer-serve")
        self._server = server
        self._channel = wire.Channel(sock)
        self._initiator = 0  # its epoch

    def run(self) -> None:
        channel = self._channel
        try:
            if self._greet(channel):
                while True:
                    self._serve(channel)
        except OSError as error:
            log.debug("transfer connection ends: %s", error)
        except Exception:
            log.exception("a fault while serving a transfer connection")
        finally:
            channel.close()

    def abort(self) -> None:
        self._channel.abort()

    def _greet(self, channel: wire.Channel) -> bool:
        deadline = time.monotonic() + GREETING_SECONDS
        magic, version, _, _, epoch, expected = wire.HELLO.unpack(channel.receive(wire.HELLO.size, deadline))
        if magic != wire.MAGIC:
            raise wire.ProtocolError("not a transfer engine")
        self._initiator = epoch
        status = wire.HELLO_OK if expected == self._server.epoch else wire.HELLO_STALE
        hello = wire.HELLO.pack(wire.MAGIC, wire.VERSION, status, 0, self._server.epoch, epoch)
        channel.send([memoryview(hello)], len(hello), deadline)
        return status == wire.HELLO_OK and version == wire.VERSION

    def _serve(self, channel: wire.Channel) -> None:
        header = wire.check_frame(channel.receive(wire.FRAME.size, math.inf))
        opcode, nbytes = header.opcode, header.nbytes
        deadline = time.monotonic() + min(header.timeout_seconds, MAX_SERVE_SECONDS)
        rest = channel.receive(header.name_nbytes + 16 * header.num_pieces, deadline)
        name = rest[: header.name_nbytes].decode(errors="replace")
        offsets, lengths = wire.unpack_table(rest[header.name_nbytes :])
        try:
            with self._only_copy(header.number, deadline):
                self._move(channel, header, name, offsets, lengths, deadline)
        except TransferError as error:  # from the checks: no byte has moved yet
            self._refuse(channel, str(error), nbytes if opcode == WRITE else 0, deadline)
            return
        if opcode == WRITE:
            answer = wire.ANSWER.pack(wire.ANSWER_MAGIC, wire.OK, 0)
            channel.send([memoryview(answer)], len(answer), deadline)

    def _only_copy(self, number: int, deadline: float) -> AbstractContextManager[None]:
        return (
            self._server.copies.only((self._initiator, number), self, deadline) if number else nullcontext()
        )

    def _move(
        self,
        channel: wire.Channel,
        header: wire.FrameHeader,
        name: str,
        offsets: np.ndarray,
        lengths: np.ndarray,
        deadline: float,
    ) -> None:
        """The bytes of a frame, with the answer before them if it reads. Raises TransferError before they move."""
        registry = self._server.registry
        with registry.use(name) as memory:
            views = _views(memory, header.opcode, name, offsets, lengths, header.nbytes)
            if header.opcode == READ:
                answer = memoryview(wire.ANSWER.pack(wire.ANSWER_MAGIC, wire.OK, 0))
                channel.send([answer, *views], len(answer) + header.nbytes, deadline, self._server.pacer)
                return
            with registry.admit(name, header.permit, offsets, lengths) as until:
                channel.receive_into(views, header.nbytes, min(deadline, until))

    @staticmethod
    def _refuse(channel: wire.Channel, reason: str, unread_nbytes: int, deadline: float) -> None:
        drain = memoryview(bytearray(min(_DRAIN_NBYTES, unread_nbytes)))
        while unread_nbytes:
            part = drain[:unread_nbytes]
            channel.receive_into([part], len(part), deadline)
            unread_nbytes -= len(part)
        raw = reason.encode()[: wire.MAX_REASON_NBYTES]
        answer = wire.ANSWER.pack(wire.ANSWER_MAGIC, wire.REFUSED, len(raw)) + raw
        channel.send([memoryview(answer)], len(answer), deadline)


def _views(
    memory: memoryview, opcode: int, name: str, offsets: np.ndarray, lengths: np.ndarray, nbytes: int
) -> list[memoryview]:
    """The ranges of `memory` that a frame names. Raises TransferError if it may not have them."""
    if opcode == WRITE and memory.readonly:
        raise TransferError(f"segment {name!r} is read-only")
    wrong = out_of_bounds(offsets, lengths, len(memory))
    if len(wrong):
        raise TransferError(bounds_reason(offsets, lengths, int(wrong[0]), name, len(memory)))
    if int(lengths.sum()) != nbytes:
        raise wire.ProtocolError(
            f"a frame's table sums to {int(lengths.sum())} bytes, its header says {nbytes}"
        )
    starts, sizes = merge_adjacent(offsets, lengths)
    ends = starts + sizes
    return [memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True) if a < b]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on (host, port), IPv4 or IPv6. Raises OSError if the address cannot be bound."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


class TcpServer:
    """Serves the registered segments of the engine with this `epoch` on `listener`, which it owns.

    The servers of an engine share `copies`.
    """

    def __init__(
        self,
        listener: socket.socket,
        epoch: int,
        registry: Registry,
        pacer: Pacer | None,
        copies: Copies,
        max_sessions: int = 512,
    ):
        self.epoch, self.registry, self.pacer, self.copies = epoch, registry, pacer, copies
        self._listener = listener
        self._max_sessions = max_sessions
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._sessions: list[_Session] = []
        self._thread = threading.Thread(target=self._accept, name="transfer-accept")
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(0.05):
                    return
                log.warning("cannot accept a transfer connection: %s", error)
                continue
            try:
                self._start(sock)
            except (OSError, RuntimeError) as error:  # the client has left, or there are too many threads
                log.warning("cannot serve a transfer connection: %s", error)
                sock.close()

    def _start(self, sock: socket.socket) -> None:
        with self._lock:
            self._sessions = [session for session in self._sessions if session.is_alive()]
            if self._closed.is_set() or len(self._sessions) >= self._max_sessions:
                log.warning("a transfer connection is refused: %d are open", len(self._sessions))
                sock.close()
                return
            session = _Session(self, sock)
            session.start()
            self._sessions.append(session)

    def close(self) -> None:
        """Stops listening, cuts every connection and joins every thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            sessions = self._sessions
        for session in sessions:
            session.abort()
        for session in sessions:
            session.join()

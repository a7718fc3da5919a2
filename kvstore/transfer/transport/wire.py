"""The TCP wire format, and a socket whose every call respects a deadline.

A connection begins with a hello in each direction; then one side sends frames and the other answers each.

    hello   magic 8 | version u16 | status u16 | 0 u32 | own epoch u64 | expected epoch u64
    frame   magic u32 | opcode u8 | 0 u8 | name bytes u16 | pieces u32 | timeout in ms u32 | payload bytes u64 | permit u64
            | number u64
            name, table (pieces × (offset u64, length u64)), and for WRITE the payload
    answer  magic u32 | status u16 | reason bytes u16; reason, and for READ that is OK the payload

A frame's number is unique at its sender, and the same when it is sent again over another rail; 0: it never is.
Integers are little-endian. The payload is the concatenation of the pieces in table order.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvstore.transfer.pacing import Pacer
from kvstore.transfer.slices import MAX_FRAME_NBYTES, MAX_FRAME_PIECES
from kvstore.transfer.status import OverdueError, TransferError

MAGIC = b"MCKVXFER"
VERSION = 3
HELLO = struct.Struct("<8sHHIQQ")
HELLO_OK, HELLO_STALE = 0, 1

FRAME_MAGIC, ANSWER_MAGIC = 0x4D46524D, 0x52534E41
FRAME = struct.Struct("<IBBHIIQQQ")
ANSWER = struct.Struct("<IHH")
OK, REFUSED = 0, 1
MAX_NAME_NBYTES = 2000  # 500 characters of UTF-8
MAX_REASON_NBYTES = 2000

_IOV_MAX = 1024
_TIMEVAL = struct.Struct("@ll")
_LOOKS = 3  # in the time of a rail's patience
_NO_COUNT = bytes(4)
_NO_LINGER = struct.pack("@ii", 1, 0)
# a connection whose other end went silently is found out, and closed on this side, within half a minute
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Patience(NamedTuple):
    """How long a rail may move nothing, in seconds; then it is left if `may_leave` says that another will do."""

    seconds: float
    may_leave: Callable[[], bool]


class ProtocolError(ConnectionError):
    """The other side does not speak this protocol; the connection is of no further use."""


class FrameHeader(NamedTuple):
    """What a frame says of itself, in its first bytes; within the limits."""

    opcode: int
    name_nbytes: int
    num_pieces: int
    timeout_seconds: float
    nbytes: int
    permit: int
    number: int


def pack_frame(
    opcode: int,
    name: str,
    offsets: np.ndarray,
    lengths: np.ndarray,
    nbytes: int,
    timeout: float,
    permit: int = 0,
    number: int = 0,
) -> bytes:
    """Header, name and table of a frame; `timeout` in seconds."""
    raw_name = name.encode()
    table = np.empty((len(offsets), 2), "<u8")
    table[:, 0], table[:, 1] = offsets, lengths
    milliseconds = min(max(0, int(timeout * 1000)), 2**32 - 1)
    header = FRAME.pack(
        FRAME_MAGIC, opcode, 0, len(raw_name), len(offsets), milliseconds, nbytes, permit, number
    )
    return b"".join((header, raw_name, table.tobytes()))


def check_frame(header: bytes) -> FrameHeader:
    """Raises ProtocolError if it is malformed."""
    magic, opcode, _, name_nbytes, pieces, milliseconds, nbytes, permit, number = FRAME.unpack(header)
    if magic != FRAME_MAGIC:
        raise ProtocolError(f"frame magic {magic:#x}")
    if opcode not in (1, 2) or not 0 < name_nbytes <= MAX_NAME_NBYTES:
        raise ProtocolError(f"frame with opcode {opcode} and a name of {name_nbytes} bytes")
    if not 0 < pieces <= MAX_FRAME_PIECES or nbytes > MAX_FRAME_NBYTES:
        raise ProtocolError(f"frame of {pieces} pieces and {nbytes} bytes")
    return FrameHeader(opcode, name_nbytes, pieces, milliseconds / 1000, nbytes, permit, number)


def unpack_table(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths, int64 `[M]`; a value that does not fit turns negative and so is out of bounds."""
    table = np.frombuffer(raw, "<i8").reshape(-1, 2)
    return table[:, 0], table[:, 1]


def advance(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `buffers` after their first `nbytes` bytes."""
    for i, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= len(buffer)
    return []


def head(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of `buffers`."""
    taken = []
    for buffer in buffers:
        if nbytes <= len(buffer):
            return [*taken, buffer[:nbytes]]
        taken.append(buffer)
        nbytes -= len(buffer)
    return taken


class StalledError(ConnectionError):
    """A rail moves nothing, and another one will do; this connection is of no further use."""


class _Quiet(NamedTuple):
    """Since when nothing has moved, and what the socket still had to send then."""

    since: float
    unsent: bytes


class RefusedError(TransferError):
    """The other side refused a frame, untouched; the connection is still good."""


class Channel:
    """A blocking socket. One thread uses it; any thread may `abort()` it.

    With `patience`, a call that moves nothing for so long ends with StalledError if another rail will do.
    """

    def __init__(self, sock: socket.socket):
        self.patience: Patience | None = None
        self._socket = sock
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def connect(self, address: Any, deadline: float) -> None:
        """Raises OverdueError or OSError."""
        left = deadline - time.monotonic()
        patience = self.patience
        hurried = patience is not None and patience.seconds < left and patience.may_leave()
        self._socket.settimeout(max(0.001, patience.seconds if patience and hurried else left))
        try:
            self._socket.connect(address)
        except TimeoutError as error:
            if hurried:
                raise StalledError("no connection within the time that a rail has") from error
            raise OverdueError("no connection within the transfer's time") from error
        self._socket.settimeout(None)

    def send(
        self, buffers: list[memoryview], nbytes: int, deadline: float, pacer: Pacer | None = None
    ) -> None:
        """Sends all of `buffers`, `nbytes` in total. Raises OverdueError or OSError."""
        quiet: _Quiet | None = None
        paid = 0  # bytes that the pacer let pass and the kernel did not take yet
        while nbytes:
            window = buffers[:_IOV_MAX]
            if pacer is not None:
                size = min(nbytes, pacer.chunk_nbytes)
                window = head(window, size)
                if size > paid:
                    pacer.pause(size - paid, deadline)
                    paid = size
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(window)
            except BlockingIOError:
                quiet = self._bear(quiet)
                continue
            quiet = None
            paid -= sent
            nbytes -= sent
            if nbytes:
                buffers = advance(buffers, sent)

    def receive_into(self, buffers: list[memoryview], nbytes: int, deadline: float) -> None:
        """Fills all of `buffers`, none of them empty, `nbytes` in total. Raises OverdueError or OSError."""
        quiet: _Quiet | None = None
        while nbytes:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                received = self._socket.recvmsg_into(buffers[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                quiet = self._bear(quiet)
                continue
            quiet = None
            if not received:
                raise ConnectionError("the peer closed the connection")
            nbytes -= received
            if nbytes:
                buffers = advance(buffers, received)

    def receive(self, nbytes: int, deadline: float) -> bytes:
        """Exactly `nbytes` bytes; only for small, bounded sizes."""
        buffer = bytearray(nbytes)
        self.receive_into([memoryview(buffer)], nbytes, deadline)
        return bytes(buffer)

    def _limit(self, option: int, deadline: float) -> None:
        if deadline == math.inf:
            seconds = microseconds = 0
        else:
            left = deadline - time.monotonic()
            if left <= 0:
                raise OverdueError("the peer did not keep up within the transfer's time")
            if self.patience is not None:
                left = min(left, self.patience.seconds / _LOOKS)
            seconds, microseconds = divmod(max(1000, int(left * 1e6)), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, microseconds))

    def _bear(self, quiet: _Quiet | None) -> _Quiet | None:
        """Called when nothing has moved for a look's time: what is known of the silence by now.

        What the peer has taken out of the socket's send buffer counts as movement. Raises StalledError.
        """
        patience = self.patience
        if patience is None:
            return None
        now, unsent = time.monotonic(), fcntl.ioctl(self._socket, termios.TIOCOUTQ, _NO_COUNT)
        if quiet is None:
            return _Quiet(now - patience.seconds / _LOOKS, unsent)
        if unsent != quiet.unsent:
            return _Quiet(now, unsent)
        if now - quiet.since >= patience.seconds and patience.may_leave():
            raise StalledError(f"nothing moved for {now - quiet.since:.2f} s")
        return quiet

    def is_open(self) -> bool:
        """False if the peer has closed the connection, or sent what nobody asked for, while it was idle."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def abort(self) -> None:
        """Wakes the thread that is blocked in a call; that call and later ones fail."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, reset: bool = False) -> None:
        """With `reset`, what the kernel has not sent yet is thrown away, and the peer learns of it at once."""
        with self._lock:
            if reset:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._socket.close()

"""What plain sockets move between two processes on loopback: the ceiling of anything that goes over TCP here."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Self

import numpy as np

NUM_CONNECTIONS = (1, 2, 4)
_SEND, _RECEIVE = b"s", b"r"


def _other_side(pipe: Connection, num_connections: int, share: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        socks = [listener.accept()[0] for _ in range(num_connections)]
    threads = [threading.Thread(target=_serve, args=(sock, share)) for sock in socks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(sock: socket.socket, share: int) -> None:
    memory = np.ones(share, np.uint8).data
    with sock:
        while way := sock.recv(1):
            if way == _SEND:
                _fill(sock, memory)
                sock.sendall(b"k")
            else:
                sock.sendall(memory)


def _fill(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        memory = memory[sock.recv_into(memory) :]


class RawSockets:
    """`nbytes` split over some connections, each with a thread on both sides; blocking calls, no protocol."""

    def __init__(self, nbytes: int, num_connections: int):
        self._share = nbytes // num_connections
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_other_side, args=(there, num_connections, self._share))
        self._process.start()
        address = here.recv()
        self._socks = [socket.create_connection(address) for _ in range(num_connections)]
        self._memory = [np.ones(self._share, np.uint8).data for _ in self._socks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._socks:
            sock.close()
        self._process.join(10)

    def gigabytes_per_second(self, op: str) -> float:
        move = self._write if op == "write" else self._read
        start = time.perf_counter()
        self._side_by_side(move)
        return self._share * len(self._socks) / (time.perf_counter() - start) / 1e9

    def _side_by_side(self, move: Callable[[socket.socket, memoryview], None]) -> None:
        pairs = zip(self._socks, self._memory, strict=True)
        threads = [threading.Thread(target=move, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @staticmethod
    def _write(sock: socket.socket, memory: memoryview) -> None:
        sock.sendall(_SEND)
        sock.sendall(memory)
        sock.recv(1)

    @staticmethod
    def _read(sock: socket.socket, memory: memoryview) -> None:
        sock.sendall(_RECEIVE)
        _fill(sock, memory)

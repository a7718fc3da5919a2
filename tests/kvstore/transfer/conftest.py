"""Engines closed after each test, and a check that nothing of them is left: threads, files, shared memory."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvstore.transfer import Segment, SharedBuffer, TransferEngine


def _open_files() -> dict[str, str]:
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            links[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return links


def _left_behind(threads: set[threading.Thread], files: dict[str, str]) -> list[object]:
    left: list[object] = [thread for thread in threading.enumerate() if thread not in threads]
    left += [name for fd, name in _open_files().items() if files.get(fd) != name]
    return left + glob.glob(f"/dev/shm/mooncake-{os.getpid()}-*")


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    threads, files = set(threading.enumerate()), _open_files()
    yield
    if _left_behind(threads, files):
        gc.collect()
    assert _left_behind(threads, files) == []


@pytest.fixture
def make_engine(nothing_leaks: None) -> Iterator[Callable[..., TransferEngine]]:
    """Creates engines; the default host ids differ, which forces TCP between them."""
    engines: list[TransferEngine] = []

    def make(host_id: str = "", **kwargs: object) -> TransferEngine:
        engine = TransferEngine(host_id=host_id or f"host-{len(engines)}", **kwargs)  # pyright: ignore
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_shared(nothing_leaks: None) -> Iterator[Callable[[str, int], SharedBuffer]]:
    buffers: list[SharedBuffer] = []

    def make(name: str, nbytes: int) -> SharedBuffer:
        buffers.append(SharedBuffer(name, nbytes))
        return buffers[-1]

    make.buffers = buffers  # pyright: ignore[reportFunctionMemberAccess]
    yield make
    for buffer in buffers:
        buffer.close()


class Relay:
    """A NIC that can be frozen, cut and restored: forwards what arrives at its own address to `target`."""

    def __init__(self, target: tuple[str, int], host: str):
        self._target = target
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.num_accepted = 0
        self.nbytes = 0
        self._listener = self._listen((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._accept_from(self._listener)

    @staticmethod
    def _listen(address: tuple[str, int]) -> socket.socket:
        return socket.create_server(address, backlog=64)

    def _accept_from(self, listener: socket.socket) -> None:
        self._start(self._accept, listener)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                far = socket.create_connection(self._target)
                with self._lock:
                    self.num_accepted += 1
                    self._pairs.append((near, far))
                self._start(self._forward, near, far)
                self._start(self._forward, far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while self._flows.wait() and (part := source.recv(1 << 16)):
                self._flows.wait()
                sink.sendall(part)
                with self._lock:
                    self.nbytes += len(part)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Holds back all bytes, and greets nobody."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Ends every connection; nobody listens any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._flows.set()
        with self._lock:
            pairs, self._pairs = self._pairs, []
            threads, self._threads = self._threads, []
        for sock in (sock for pair in pairs for sock in pair):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in (sock for pair in pairs for sock in pair):
            sock.close()

    def restore(self) -> None:
        self._listener = self._listen(self.address)
        self._accept_from(self._listener)


@pytest.fixture
def make_relay(nothing_leaks: None) -> Iterator[Callable[..., Relay]]:
    """`make_relay(target address, host="127.0.0.1")`."""
    relays: list[Relay] = []

    def make(target: tuple[str, int], host: str = "127.0.0.1") -> Relay:
        relays.append(Relay(target, host))
        return relays[-1]

    yield make
    for relay in relays:
        relay.cut()


@dataclass
class Pair:
    """`engine` reaches `segment`, whose bytes are `memory`, over `path`; `owner` is the engine it is of."""

    path: str
    engine: TransferEngine
    owner: TransferEngine
    segment: Segment
    memory: np.ndarray


@pytest.fixture
def make_pair(
    make_engine: Callable[..., TransferEngine], make_shared: Callable[[str, int], SharedBuffer]
) -> Callable[..., Pair]:
    """`make_pair(path, nbytes, **engine_arguments)`."""

    def make(path: str, nbytes: int, **kwargs: object) -> Pair:
        engine = make_engine("host-a", **kwargs)
        owner = engine if path == "loopback" else make_engine("host-a" if path == "shm" else "host-b")
        if path == "shm":
            shared = make_shared("pair", nbytes)
            memory, shm_path = shared.array, shared.path
        else:
            memory, shm_path = np.zeros(nbytes, np.uint8), ""
        segment = owner.register_local_memory(memory, name="pair", shm_path=shm_path)
        return Pair(path, engine, owner, segment, memory)

    return make

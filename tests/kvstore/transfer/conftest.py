"""Engines that are closed after each test, and a check that nothing of them is left: threads, files, shared memory."""

from __future__ import annotations

import gc
import glob
import os
import threading
from collections.abc import Callable, Iterator

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


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    gc.collect()
    threads, files = set(threading.enumerate()), _open_files()
    yield
    gc.collect()
    assert set(threading.enumerate()) - threads == set()
    assert {fd: name for fd, name in _open_files().items() if files.get(fd) != name} == {}
    assert glob.glob(f"/dev/shm/mooncake-{os.getpid()}-*") == []


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

    yield make
    for buffer in buffers:
        buffer.close()


class Pair:
    """`engine` reaches `segment`, whose bytes are `memory`, over `path`; `owner` is the engine that serves it."""

    def __init__(self, path: str, engine: TransferEngine, owner: TransferEngine, segment: Segment, memory: np.ndarray):
        self.path, self.engine, self.owner, self.segment, self.memory = path, engine, owner, segment, memory


@pytest.fixture
def make_pair(
    make_engine: Callable[..., TransferEngine], make_shared: Callable[[str, int], SharedBuffer]
) -> Callable[..., Pair]:
    """`make_pair(path, nbytes, **engine_arguments)`."""

    def make(path: str, nbytes: int, **kwargs: object) -> Pair:
        engine = make_engine("host-a", **kwargs)
        if path == "loopback":
            owner = engine
        else:
            owner = make_engine("host-a" if path == "shm" else "host-b")
        if path == "shm":
            shared = make_shared("pair", nbytes)
            memory, shm_path = shared.array, shared.path
        else:
            memory, shm_path = np.zeros(nbytes, np.uint8), ""
        segment = owner.register_local_memory(memory, name="pair", shm_path=shm_path)
        return Pair(path, engine, owner, segment, memory)

    return make

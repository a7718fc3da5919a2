"""Engines closed after each test, and a check that nothing of them is left: threads, files, shared memory."""

from __future__ import annotations

import gc
import glob
import os
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

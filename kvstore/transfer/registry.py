"""The memory that this process lets others read and write, by name; a segment in use is not taken away."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.transfer.buffers import address_of, byte_view
from kvstore.transfer.guard import WriteGuard
from kvstore.transfer.segment import DEFAULT_LOCATION, Peer, Segment
from kvstore.transfer.status import TransferError

MAX_NAME_CHARS = 500


@dataclass
class _Registration:
    segment: Segment
    view: memoryview
    guard: WriteGuard | None
    address: int
    num_users: int = 0
    leaving: bool = False


class Devices(Protocol):
    """What must know of memory before its devices can reach it."""

    def register(self, view: memoryview) -> None: ...
    def unregister(self, view: memoryview) -> None: ...


class Registry:
    """Registered segments of the engine `peer`; `devices`, if any, are told of them."""

    def __init__(self, peer: Peer, devices: Devices | None = None):
        self._peer, self._devices = peer, devices
        self._changed = threading.Condition()
        self._entries: dict[str, _Registration] = {}

    def add(
        self, buffer: object, location: str, name: str, shm_path: str, guard: WriteGuard | None = None
    ) -> Segment:
        """Registers `buffer` as `name`.

        Raises ValueError if the name is bad or taken, or the file `shm_path` has another size.
        """
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise ValueError(f"segment name of {len(name)} characters: expected 1 to {MAX_NAME_CHARS}")
        view = byte_view(buffer)
        if shm_path and (size := os.stat(shm_path).st_size) != view.nbytes:
            raise ValueError(
                f"segment {name!r} has {view.nbytes} bytes, its file {shm_path} {size}: register all of it"
            )
        address = 0 if self._devices is None else address_of(view)
        segment = Segment(self._peer, name, view.nbytes, location, shm_path, guard is not None, address)
        with self._changed:
            if name in self._entries:
                raise ValueError(
                    f"segment {name!r} is registered already: unregister it first or take another name"
                )
            if self._devices is not None:
                self._devices.register(view)
            self._entries[name] = _Registration(segment, view, guard, address_of(view))
        return segment

    def location_of(self, view: memoryview) -> str:
        """Where registered memory that holds the flat `view` is; the default for memory that is not registered."""
        address = address_of(view)
        with self._changed:
            for entry in self._entries.values():
                if entry.address <= address < entry.address + len(entry.view):
                    return entry.segment.location
        return DEFAULT_LOCATION

    @contextmanager
    def use(self, name: str) -> Iterator[memoryview]:
        """The bytes of `name`, registered until the context ends. Raises TransferError if unknown."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is None or entry.leaving:
                owner = f"{self._peer.host_id!r} (epoch {self._peer.epoch:016x})"
                raise TransferError(f"unknown segment: {name!r} is not registered at {owner}")
            entry.num_users += 1
        try:
            yield entry.view
        finally:
            with self._changed:
                entry.num_users -= 1
                self._changed.notify_all()

    def admit(
        self, name: str, permit: int, offsets: np.ndarray, lengths: np.ndarray
    ) -> AbstractContextManager[float]:
        """Within `use`: held while ranges of `name` are written, as `WriteGuard.admit` says.

        Without a guard everything is admitted, for any time.
        """
        with self._changed:
            guard = self._entries[name].guard
        return nullcontext(math.inf) if guard is None else guard.admit(permit, offsets, lengths)

    def remove(self, name: str, wait_seconds: float) -> None:
        """Forgets `name`. Raises ValueError if unknown, TransferError if still in use after `wait_seconds`.

        While it waits, new transfers on the segment are refused.
        """
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                raise ValueError(f"segment {name!r} is not registered")
            entry.leaving = True
            if not self._changed.wait_for(lambda: entry.num_users == 0, wait_seconds):
                entry.leaving = False
                raise TransferError(
                    f"segment {name!r} has {entry.num_users} transfers in flight: wait for them first"
                )
            if self._devices is not None:
                self._devices.unregister(entry.view)
            del self._entries[name]

    def clear(self) -> None:
        """Drops every registration; for the end of the engine, when nothing is served any more."""
        with self._changed:
            if self._devices is not None:
                for entry in self._entries.values():
                    self._devices.unregister(entry.view)
            self._entries.clear()

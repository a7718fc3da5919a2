"""Loopback: the segment belongs to this very engine, so a transfer is a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.transfer.batch import Frame
from kvstore.transfer.registry import Registry
from kvstore.transfer.request import READ
from kvstore.transfer.transport.copier import Copier


class LoopbackPath(Copier):
    """The path to the engine's own segments."""

    def __init__(self, registry: Registry):
        super().__init__("loopback")
        self._registry = registry

    @contextmanager
    def use(self, frame: Frame) -> Iterator[memoryview]:
        """Raises TransferError if the segment is not registered, or its guard refuses the write."""
        name = frame.target.name
        with self._registry.use(name) as memory:
            if frame.opcode is READ:
                yield memory
                return
            with self._registry.admit(name, frame.permit, frame.offsets, frame.lengths):
                yield memory

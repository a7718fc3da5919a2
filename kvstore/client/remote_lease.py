"""Objects leased on another node, and reading ranges of them one-sidedly."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvstore.arguments import as_bytes
from kvstore.client.onesided import maps_memory, move
from kvstore.errors import InvalidError, StaleError, StoreError, UnavailableError
from kvstore.messages import MAX_BATCH_KEYS, HandleRequest, HeldBlock, NodeInfo, NodeKeys
from kvstore.node.store import GENERATION_NBYTES
from kvstore.parts import covered_parts
from kvstore.rpc import Stub
from kvstore.transfer import READ, TransferEngine, TransferError

_CLOSE_SECONDS = 1.0
log = logging.getLogger(__name__)


class RemoteLease:
    """Some objects of one node, not evicted there until `close` or `lease_seconds` after they were leased.

    What is read is never wrong: whole parts that came over the network are compared with their crc32; through
    shared memory, and for ranges that cut a part, the slot's generation is read again after the copy. On the same
    host `views` gives the bytes in place.
    """

    def __init__(
        self,
        info: NodeInfo,
        keys: Sequence[bytes],
        *,
        stub: Stub,
        engine: TransferEngine,
        timeout_seconds: float,
        on_corrupt: Callable[[NodeInfo, list[bytes]], None],
    ):
        """Leases `keys`, one call per `MAX_BATCH_KEYS`. Raises what those calls raise."""
        self.info = info
        self._keys = keys
        self._stub = stub
        self._engine = engine
        self._on_corrupt = on_corrupt
        self._blocks: list[HeldBlock | None] = []
        self._handles: list[int] = []
        self._expires = float("inf")
        self.waiting: list[int] = []  # there on SSD, and not held: lease them again without the others
        deadline = time.monotonic() + timeout_seconds
        try:
            for start in range(0, len(keys), MAX_BATCH_KEYS):
                asked = time.monotonic()
                request = NodeKeys(info.epoch, list(keys[start : start + MAX_BATCH_KEYS]))
                reply = stub.lease(request, timeout=max(0.001, deadline - asked))
                self._handles.append(reply.handle)
                self._blocks += reply.held
                self.waiting += [start + item for item in reply.waiting]
                self._expires = min(self._expires, asked + reply.lease_seconds)
        except BaseException:
            self.close()
            raise
        self.held: list[bool] = [block is not None for block in self._blocks]

    def nbytes(self, index: int) -> int:
        """Size of a leased object."""
        return self._block(index).nbytes

    def part_nbytes(self, index: int) -> int:
        """Bytes that one crc32 of a leased object covers."""
        return self._block(index).part_nbytes

    def crcs(self, index: int, part_nbytes: int) -> Sequence[int] | None:
        """crc32 of each part of a leased object; None where its parts have another size."""
        block = self._block(index)
        return block.crcs if block.part_nbytes == part_nbytes else None

    def namespace(self, index: int) -> str:
        """That of a leased object."""
        return self._block(index).namespace

    def read(
        self,
        indices: Sequence[int],
        offset: int,
        nbytes: int,
        buffers: Sequence[object],
        timeout_seconds: float | None = None,
    ) -> None:
        """One batch: bytes `offset … offset + nbytes` of each object in `indices` into the buffer beside it.

        On an error the buffers' contents are undefined. Raises InvalidError for ranges or buffers that do not
        fit, StaleError when the lease is over or the bytes are not those that were leased, UnavailableError
        when the node cannot be reached in `timeout_seconds` (None: until the lease is over).
        """
        right = self.try_read(indices, offset, nbytes, buffers, timeout_seconds)
        if not all(right):
            bad = [index for index, ok in zip(indices, right, strict=True) if not ok]
            raise StaleError(f"objects {bad} of the lease on node {self.info.name!r} are not what was leased")

    def try_read(
        self,
        indices: Sequence[int],
        offset: int,
        nbytes: int,
        buffers: Sequence[object],
        timeout_seconds: float | None = None,
    ) -> list[bool]:
        """`read`, but objects whose bytes are not those that were leased are answered False."""
        if not indices:
            return []
        if len(indices) != len(buffers):
            raise InvalidError(f"{len(indices)} objects but {len(buffers)} buffers")
        blocks = [self._block(index) for index in indices]
        views = [as_bytes(buffer, f"buffer {i}", writable=True) for i, buffer in enumerate(buffers)]
        for index, block, view in zip(indices, blocks, views, strict=True):
            if offset < 0 or nbytes < 1 or offset + nbytes > block.nbytes or len(view) != nbytes:
                size = f"object {index} has {block.nbytes} bytes"
                raise InvalidError(f"{size}: cannot read {nbytes} at {offset} into {len(view)}")
        left = self._check_time()
        timeout = left if timeout_seconds is None else timeout_seconds
        ranges = [(block.offset + offset, view) for block, view in zip(blocks, views, strict=True)]
        move(self._engine, READ, self.info.segment, ranges, timeout)
        if maps_memory(self._engine, self.info.segment):
            return self._same_generations(blocks, timeout)
        right = [_matches(block, offset, view) for block, view in zip(blocks, views, strict=True)]
        if None in right:
            return self._same_generations(blocks, timeout)
        damaged = [self._keys[index] for index, ok in zip(indices, right, strict=True) if not ok]
        if damaged:
            self._on_corrupt(self.info, damaged)
        return [bool(ok) for ok in right]

    @contextmanager
    def views(self, indices: Sequence[int]) -> Iterator[list[memoryview]]:
        """The bytes of objects in the memory of a node on this host, `[nbytes]` each, read-only, without a copy.

        They are good for as long as the lease is: at the end of the context StaleError is raised if it has run out
        or a slot has changed, and whatever was made of the bytes is to be thrown away. Do not keep them any longer.

        Raises InvalidError for objects that are not held, StaleError when the lease is over, UnavailableError for a
        node of another host, or that is gone.
        """
        blocks = [self._block(index) for index in indices]
        self._check_time()
        try:
            memory = self._engine.view(self.info.segment)
        except TransferError as error:
            raise UnavailableError(f"no view of the memory of node {self.info.name!r}: {error}") from error
        if any(block.offset + block.nbytes > len(memory) for block in blocks):
            raise StaleError(f"node {self.info.name!r} leased bytes beyond its memory of {len(memory)} bytes")
        self._check_generations(indices, blocks, memory)
        yield [memory[block.offset : block.offset + block.nbytes] for block in blocks]
        self._check_generations(indices, blocks, memory)
        self._check_time()

    def _check_generations(
        self, indices: Sequence[int], blocks: Sequence[HeldBlock], memory: memoryview
    ) -> None:
        last = max((block.slot for block in blocks), default=-1)
        now = memory[: (last + 1) * GENERATION_NBYTES].cast("Q")
        bad = [
            index for index, block in zip(indices, blocks, strict=True) if now[block.slot] != block.generation
        ]
        if bad:
            raise StaleError(f"objects {bad} of the lease on node {self.info.name!r} are not what was leased")

    def _check_time(self) -> float:
        """Seconds that the lease still has. Raises StaleError for none."""
        left = self._expires - time.monotonic()
        if left <= 0:
            raise StaleError(f"the lease on node {self.info.name!r} is over: lease again")
        return left

    def close(self) -> None:
        """The node may evict the objects again. A node that cannot be told ends the lease in its time."""
        handles, self._handles = self._handles, []
        for handle in handles:
            try:
                self._stub.release(HandleRequest(self.info.epoch, handle), timeout=_CLOSE_SECONDS)
            except StoreError as error:
                log.debug("lease on node %s was not released: %s", self.info.name, error)
                break

    def __enter__(self) -> RemoteLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _block(self, index: int) -> HeldBlock:
        block = self._blocks[index]
        if block is None:
            raise InvalidError(f"item {index} of the lease is not held on node {self.info.name!r}")
        return block

    def _same_generations(self, blocks: list[HeldBlock], timeout: float) -> list[bool]:
        first = min(block.slot for block in blocks)
        last = max(block.slot for block in blocks)
        now = np.zeros(last - first + 1, "<u8")
        move(
            self._engine,
            READ,
            self.info.segment,
            [(first * GENERATION_NBYTES, now.data.cast("B"))],
            timeout,
        )
        return [int(now[block.slot - first]) == block.generation for block in blocks]


def _matches(block: HeldBlock, offset: int, view: memoryview) -> bool | None:
    """Whether the bytes have the crcs of their parts; None if the range cuts a part."""
    parts = covered_parts(offset, len(view), block.nbytes, block.part_nbytes)
    if parts is None:
        return None
    size = block.part_nbytes
    return all(
        zlib.crc32(view[(part - parts.start) * size : (part - parts.start + 1) * size]) == block.crcs[part]
        for part in parts
    )

"""What a node lends to its own process: slots to write, and objects to read in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from kvstore.errors import InvalidError, UnavailableError
from kvstore.messages import Refusal
from kvstore.node.slots import Block, ReserveOutcome
from kvstore.node.store import SlotStore
from kvstore.transfer.segment import Segment


class _Handle(ABC):
    """Some blocks of `segment`, by position in the call that asked; its own until `close`."""

    def __init__(
        self,
        store: SlotStore,
        segment: Segment,
        handle: int,
        blocks: list[Block | None],
        give_up: Callable[[int], bool],
    ):
        self.segment = segment
        self._store = store
        self._handle = handle
        self._blocks = blocks
        self._give_up = give_up

    def offset(self, index: int) -> int:
        """Where that object's slot is in `segment`."""
        return self._store.layout.offset(self._block(index).slot)

    def close(self) -> None:
        """Give up what is held. May be called again, and after the node was closed."""
        with suppress(UnavailableError):
            self._give_up(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _block(self, index: int) -> Block:
        block = self._blocks[index]
        if block is None:
            raise InvalidError(self._absence(index))
        return block

    @abstractmethod
    def _absence(self, index: int) -> str:
        """Why there is no block at this position."""


class Reservation(_Handle):
    """Slots to write, held by this process until committed or closed.

    `close` frees what was not committed. Call it only when nobody in this process writes any more; a slot
    into which a peer is writing at that moment is free when that has ended.
    """

    def __init__(self, store: SlotStore, segment: Segment, handle: int, outcome: ReserveOutcome):
        super().__init__(store, segment, handle, outcome.blocks, store.abort)
        self.accepted: list[bool] = [block is not None for block in outcome.blocks]
        self.reasons: list[Refusal] = outcome.refusals  # "" where accepted
        self.permit = handle  # for peers that write into `segment`

    def buffer(self, index: int) -> memoryview:
        """The bytes of the slot to write, `[nbytes]`."""
        return self._store.view(self._block(index))

    def commit(self, index: int, crcs: Sequence[int] | None = None) -> None:
        """Make the object visible.

        `crcs`: crc32 per part, taken on trust; when None they are computed in the background, or as soon as
        somebody asks for them: a client elsewhere, the SSD tier, `Lease.crcs`.

        Raises InvalidError for a refused item, a wrong number of crcs or while a peer is writing into it,
        StaleError for one that is committed already.
        """
        self._block(index)
        self._store.commit(self._handle, index, crcs, verify=False)

    def _absence(self, index: int) -> str:
        return f"item {index} of the reservation was refused: {self.reasons[index]}"


class Lease(_Handle):
    """Objects that this process reads in place.

    After `close` they may be evicted: views must not be used any more, the slots may be rewritten.
    """

    def __init__(
        self,
        store: SlotStore,
        segment: Segment,
        handle: int,
        blocks: list[Block | None],
        waiting: list[int],
    ):
        super().__init__(store, segment, handle, blocks, store.release)
        self.held: list[bool] = [block is not None for block in blocks]
        self.waiting = waiting  # items on SSD for which there was no slot: lease them when these are closed

    def view(self, index: int) -> memoryview:
        """The object's bytes in the slot, `[nbytes]`, read-only, without a copy."""
        return self._store.view(self._block(index)).toreadonly()

    def crcs(self, index: int) -> tuple[int, ...]:
        """crc32 of each part."""
        return self._store.crcs(self._block(index))

    def _absence(self, index: int) -> str:
        return f"item {index} of the lease is not held here"

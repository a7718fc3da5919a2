"""The Node service: what clients in other processes may ask of a store node. Validate, delegate, reply."""

from __future__ import annotations

from collections import Counter

from kvstore import messages as m
from kvstore.errors import InvalidError, StaleError
from kvstore.node.slots import Block
from kvstore.node.store import SlotStore
from kvstore.rpc import Empty


class NodeService:
    """Handler of the NODE table. Leases and reservations made here end after `lease_seconds`."""

    def __init__(self, store: SlotStore, epoch: int, lease_seconds: float):
        self._store = store
        self._epoch = epoch
        self._lease_seconds = lease_seconds

    def reserve(self, request: m.NodeReserve) -> m.ReserveReply:
        self._check_epoch(request.epoch)
        handle, outcome = self._store.reserve(
            request.keys,
            request.nbytes,
            request.part_nbytes,
            self._lease_seconds,
            namespace=request.namespace,
        )
        items = [
            m.Reserved(refusal, 0 if block is None else self._store.layout.offset(block.slot))
            for block, refusal in zip(outcome.blocks, outcome.refusals, strict=True)
        ]
        return m.ReserveReply(handle, self._lease_seconds, items)

    def commit(self, request: m.CommitRequest) -> m.Flags:
        """Given crcs are compared with the bytes that arrived, so that a torn write is never visible."""
        self._check_epoch(request.epoch)
        indices = [item.index for item in request.items]
        if len(set(indices)) != len(indices):
            raise InvalidError("commit names an item twice")
        return m.Flags(
            [self._store.commit(request.handle, i.index, i.crcs, verify=True) for i in request.items]
        )

    def abort(self, request: m.HandleRequest) -> Empty:
        self._check_epoch(request.epoch)
        self._store.abort(request.handle)
        return Empty()

    def lease(self, request: m.NodeKeys) -> m.LeaseReply:
        self._check_epoch(request.epoch)
        handle, blocks = self._store.lease(request.keys, self._lease_seconds)
        held = [self._held(block) for block in blocks]
        return m.LeaseReply(handle, self._lease_seconds, held, self._store.waiting(request.keys, blocks))

    def release(self, request: m.HandleRequest) -> Empty:
        self._check_epoch(request.epoch)
        self._store.release(request.handle)
        return Empty()

    def exists(self, request: m.NodeKeys) -> m.Flags:
        self._check_epoch(request.epoch)
        return m.Flags(self._store.exists(request.keys))

    def remove(self, request: m.NodeKeys) -> m.Flags:
        self._check_epoch(request.epoch)
        return m.Flags(self._store.remove(request.keys))

    def check(self, request: m.NodeKeys) -> m.Flags:
        self._check_epoch(request.epoch)
        return m.Flags(self._store.check(request.keys))

    def drain(self, request: m.NodeDrain) -> Empty:
        self._check_epoch(request.epoch)
        self._store.draining = request.draining
        return Empty()

    def drop_namespace(self, request: m.NodeNamespace) -> m.Counted:
        self._check_epoch(request.epoch)
        return m.Counted(self._store.drop_namespace(request.namespace))

    def stats(self, request: Empty) -> m.NodeStats:
        return m.NodeStats(self._store.stats(), dict(Counter(self._store.namespaces().values())))

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleError(
                f"meant for epoch {epoch:x} of this node, now it is epoch {self._epoch:x}: look it up again"
            )

    def _held(self, block: Block | None) -> m.HeldBlock | None:
        if block is None:
            return None
        return m.HeldBlock(
            slot=block.slot,
            offset=self._store.layout.offset(block.slot),
            generation=block.generation,
            nbytes=block.nbytes,
            part_nbytes=block.part_nbytes,
            crcs=list(self._store.crcs(block)),
            namespace=block.namespace,
        )

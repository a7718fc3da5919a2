"""Storing objects on another node: reserve → one-sided WRITE → commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from kvstore.client.onesided import move
from kvstore.errors import StoreError
from kvstore.messages import CommitItem, CommitRequest, HandleRequest, NodeInfo, NodeReserve, ReserveReply
from kvstore.parts import part_crcs
from kvstore.rpc import Stub
from kvstore.transfer import WRITE, TransferEngine

PutResult = Literal["stored", "present", "writing", "no_room", "too_large", "failed"]
_RESERVE_SECONDS = 2.0
_ABORT_SECONDS = 1.0


def put_on(
    info: NodeInfo,
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
    part_nbytes: int,
    *,
    stub: Stub,
    engine: TransferEngine,
    deadline: float,
    namespace: str = "",
) -> list[PutResult]:
    """Store objects of one size; at most `MAX_BATCH_KEYS`, until `deadline` (monotonic). "failed": what
    was sent did not arrive whole, or too late.

    Raises what the reserve call raises.
    """
    asked = time.monotonic()
    request = NodeReserve(info.epoch, list(keys), len(buffers[0]), part_nbytes, namespace)
    reply = stub.reserve(request, timeout=max(0.001, min(_RESERVE_SECONDS, deadline - asked)))
    results: list[PutResult] = [item.refusal or "failed" for item in reply.items]
    accepted = [index for index, item in enumerate(reply.items) if not item.refusal]
    if not accepted:
        return results
    deadline = min(deadline, asked + reply.lease_seconds)
    try:
        ranges = [(reply.items[index].offset, buffers[index]) for index in accepted]
        move(engine, WRITE, info.segment, ranges, deadline - time.monotonic(), reply.handle)
        items = [CommitItem(index, list(part_crcs(buffers[index], part_nbytes))) for index in accepted]
        commit = CommitRequest(info.epoch, reply.handle, items)
        flags = stub.commit(commit, timeout=max(0.001, deadline - time.monotonic())).flags
    except StoreError:
        _abort(info, reply, stub)
        return results
    for index, committed in zip(accepted, flags, strict=True):
        if committed:
            results[index] = "stored"
    return results


def _abort(info: NodeInfo, reply: ReserveReply, stub: Stub) -> None:
    try:
        stub.abort(HandleRequest(info.epoch, reply.handle), timeout=_ABORT_SECONDS)
    except StoreError:
        return  # the reservation ends with its lease

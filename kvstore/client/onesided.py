"""Moving object bytes between local buffers and a node's segment, with the errors of this package."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import UnavailableError
from kvstore.transfer import Opcode, Segment, TransferEngine, TransferError, TransferRequest


def move(
    engine: TransferEngine,
    opcode: Opcode,
    segment: Segment,
    ranges: Sequence[tuple[int, memoryview]],
    timeout_seconds: float,
    permit: int = 0,
) -> None:
    """Move each `(offset in segment, local bytes)`; a WRITE needs the node's `permit`.

    Raises UnavailableError if not all of them arrived in time.
    """
    requests = [TransferRequest(opcode, local, segment, offset, permit) for offset, local in ranges]
    try:
        engine.transfer(requests, timeout_seconds=max(timeout_seconds, 0.001))
    except TransferError as error:
        raise UnavailableError(
            f"{opcode.name} of {len(requests)} ranges of {segment.name!r}: {error}"
        ) from error


def maps_memory(engine: TransferEngine, segment: Segment) -> bool:
    """Whether the engine reads the segment through memory, without a network."""
    own = engine.peer
    return segment.peer.epoch == own.epoch or (segment.peer.host_id == own.host_id and bool(segment.shm_path))

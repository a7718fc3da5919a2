"""What a caller asks of the transfer engine: move these bytes between local memory and a segment."""

from __future__ import annotations

import enum

import msgspec

from kvstore.transfer.segment import Segment


class Opcode(enum.IntEnum):
    """Direction, seen from the caller: READ fills local memory from the segment, WRITE fills the segment."""

    READ = 1
    WRITE = 2


READ = Opcode.READ
WRITE = Opcode.WRITE


class TransferRequest(msgspec.Struct, frozen=True):
    """One contiguous range to move (paper, Listing 1).

    `local` is a C-contiguous memoryview of any format and shape, writable for READ; `offset` is the first
    byte in `target`. The caller leaves `local` alone until the request has ended. `permit` is what the owner
    of guarded memory gave for this WRITE, below 2**63.
    """

    opcode: Opcode
    local: memoryview
    target: Segment
    offset: int
    permit: int = 0

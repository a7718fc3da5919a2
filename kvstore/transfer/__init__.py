"""The transfer engine: one-sided batch reads and writes between registered memory of different processes."""

from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.faults import Faults
from kvstore.transfer.guard import WriteGuard
from kvstore.transfer.request import READ, WRITE, Opcode, TransferRequest
from kvstore.transfer.segment import Peer, Segment
from kvstore.transfer.status import TransferError, TransferState, TransferStatus
from kvstore.transfer.topology import Topology
from kvstore.transfer.transport.mooncake import Upstream
from kvstore.transfer.transport.network import RailState
from kvstore.transfer.transport.shm import SharedBuffer

__all__ = [
    "READ",
    "WRITE",
    "Faults",
    "Opcode",
    "Peer",
    "RailState",
    "Segment",
    "SharedBuffer",
    "Topology",
    "TransferEngine",
    "TransferError",
    "TransferRequest",
    "TransferState",
    "TransferStatus",
    "Upstream",
    "WriteGuard",
]

"""The global KVCache store: `Directory` (who holds what), `Node` (DRAM slots), `Client` (put, get, remove)."""

from kvstore.block import BlockFormat, chain_keys, root_key
from kvstore.client import ChangeResult, Client, MoveReport, PutResult, RemoteLease
from kvstore.directory import Directory, DirectoryReplica, PrefixIndex, ReplicaListener
from kvstore.node import Lease, Node, NodeConfig, Reservation

__all__ = [
    "BlockFormat",
    "ChangeResult",
    "Client",
    "Directory",
    "DirectoryReplica",
    "Lease",
    "MoveReport",
    "Node",
    "NodeConfig",
    "PrefixIndex",
    "PutResult",
    "RemoteLease",
    "ReplicaListener",
    "Reservation",
    "chain_keys",
    "root_key",
]

"""The global KVCache store: `Directory` (who holds what), `Node` (DRAM slots), `Client` (put, get, remove)."""

from kvstore.block import BlockFormat, chain_keys, root_key
from kvstore.client import Client, PutResult, RemoteLease
from kvstore.directory import Directory, DirectoryReplica, PrefixIndex, ReplicaListener
from kvstore.node import Lease, Node, NodeConfig, Reservation

__all__ = [
    "BlockFormat",
    "Client",
    "Directory",
    "DirectoryReplica",
    "Lease",
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

"""The global KVCache store: `Directory` (who holds what), `Node` (DRAM slots), `Client` (put, get, remove)."""

from kvstore.block import BlockFormat, chain_keys, root_key
from kvstore.client import Client
from kvstore.directory import Directory
from kvstore.handles import Lease, Reservation
from kvstore.index import PrefixIndex, PrefixMatch
from kvstore.node import Node, NodeConfig
from kvstore.remote_lease import RemoteLease
from kvstore.remote_put import PutResult
from kvstore.watch import DirectoryReplica, ReplicaListener

__all__ = [
    "BlockFormat",
    "Client",
    "Directory",
    "DirectoryReplica",
    "Lease",
    "Node",
    "NodeConfig",
    "PrefixIndex",
    "PrefixMatch",
    "PutResult",
    "RemoteLease",
    "ReplicaListener",
    "Reservation",
    "chain_keys",
    "root_key",
]

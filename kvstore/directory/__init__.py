"""Who holds what: the directory, and the replica of it that each of its users keeps."""

from kvstore.directory.directory import Directory
from kvstore.directory.index import PrefixIndex
from kvstore.directory.replica import DirectoryReplica, ReplicaListener

__all__ = ["Directory", "DirectoryReplica", "PrefixIndex", "ReplicaListener"]

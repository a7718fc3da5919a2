"""What users of the store call, and how it reaches other nodes."""

from kvstore.client.client import Client
from kvstore.client.remote_lease import RemoteLease
from kvstore.client.remote_put import PutResult
from kvstore.client.replicas import ChangeResult, MoveReport

__all__ = ["ChangeResult", "Client", "MoveReport", "PutResult", "RemoteLease"]

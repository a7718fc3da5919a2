"""What a remote process must know of a piece of registered memory: who owns it, how large it is, how to reach it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(max_length=500)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Location = Annotated[str, Meta(max_length=32)]  # of memory: "cpu:0" a NUMA node's, "cuda:0" a GPU's
Rail = tuple[Text, Annotated[int, Meta(ge=0, lt=65536)]]
Tiers = Annotated[list[Annotated[int, Meta(ge=0, le=2)]], Meta(max_length=64)]
TierTable = Annotated[dict[Location, Tiers], Meta(max_length=32)]
DEFAULT_LOCATION = "cpu:0"


class Peer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One transfer engine. `epoch` is random per process: a restart on the same address is another peer."""

    epoch: Size
    # equal host ids may share memory; tests and benches set different ones to force the network
    host_id: Text
    # (host, port) of every TCP listener, one per NIC
    rails: list[Rail]
    # what of its topology matrix others need: for each memory, whether a rail is preferred (0), secondary (1) or neither
    tiers: TierTable = {}
    # (host, port) of every upstream engine, one per RDMA device, and the same of them
    sessions: list[Rail] = []
    session_tiers: TierTable = {}


class Segment(msgspec.Struct, frozen=True):
    """Registered memory at `peer`, addressed one-sidedly by (name, byte offset)."""

    peer: Peer
    name: Text
    nbytes: Size
    location: Location = DEFAULT_LOCATION
    shm_path: Text = ""  # file under /dev/shm that holds it, "" if it is private memory
    guarded: bool = False  # every write needs a permit and goes through `peer`, even on the same host
    address: Size = (
        0  # of its first byte in the owner's memory, for the owner's upstream engines; 0 without them
    )

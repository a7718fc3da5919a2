"""The Directory and Node service tables: how store nodes, clients and the directory talk.

Block bytes never travel here.

Directory: `register` → `heartbeat` and `announce`, again and again → `leave`;
           `lookup` and `nodes` ask; `watch` streams.
Node:      `reserve` → one-sided WRITE → `commit` (or `abort`); `lease` → one-sided READ → `release`;
           `exists`, `remove`, `check`, `drain`, `drop_namespace`, `stats`.
Every node call carries the epoch of the node it is meant for: another epoch is a StaleError.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstore.block import KEY_NBYTES
from kvstore.rpc import Empty, Method, Service
from kvstore.transfer.segment import Segment

MAX_BATCH_KEYS = 4096  # keys in one message; callers with more send several
MAX_PARTS = 256  # crcs of one object: 4096 x 256 x 5 bytes stay below the message limit
MAX_OBJECT_NBYTES = 1 << 40
WATCH_BEAT_SECONDS = 1.0  # a watch stream is never silent for longer

Key = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_BATCH_KEYS)]
NodeName = Annotated[str, Meta(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9._-]+$")]
Address = Annotated[str, Meta(min_length=1, max_length=300)]
Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Handle = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sequence = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ObjectSize = Annotated[int, Meta(ge=1, le=MAX_OBJECT_NBYTES)]
Namespace = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9._:-]*$")]
Crc = Annotated[int, Meta(ge=0, lt=2**32)]
Crcs = Annotated[list[Crc], Meta(max_length=MAX_PARTS)]
Tier = Literal["dram", "ssd"]
Refusal = Literal["", "present", "writing", "no_room", "too_large"]


class NodeInfo(msgspec.Struct, frozen=True):
    """What a store node says of itself when it registers."""

    name: NodeName
    epoch: Epoch  # random per node object: a restart on the same address is another node
    address: Address  # of its Node service, host:port
    host_id: Annotated[str, Meta(max_length=500)]
    segment: Segment  # its memory: generations of the slots (u64 each), then the slots
    num_slots: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    slot_nbytes: ObjectSize  # the largest object it takes
    num_ssd_slots: Count = 0  # of the tier below


class RegisterReply(msgspec.Struct, frozen=True):
    """The directory's side of a registration."""

    beat_seconds: Annotated[float, Meta(gt=0.0, le=3600.0)]  # how often the node must be heard


class NodeBeat(msgspec.Struct, frozen=True):
    """A node lives, how many slots it has that hold nothing, and whether it takes anything new."""

    name: NodeName
    epoch: Epoch
    num_free: Count
    is_draining: bool = False


class Announce(msgspec.Struct, frozen=True):
    """The next changes of what a node holds; no key comes twice. Counts as a heartbeat."""

    name: NodeName
    epoch: Epoch
    sequence: Sequence  # 1 after a registration, then one more each; the last one sent again is taken once
    added: Keys  # in DRAM from now on
    removed: Keys
    num_free: Count
    on_ssd: Keys = []  # on SSD only, from now on
    is_draining: bool = False


class Known(msgspec.Struct, frozen=True):
    """False: the directory does not know this node, or missed an announcement.

    It must register and announce all.
    """

    known: bool


class NodeId(msgspec.Struct, frozen=True):
    """One life of a node."""

    name: NodeName
    epoch: Epoch


class LookupRequest(msgspec.Struct, frozen=True):
    keys: Keys


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """One holder of a key: an index into the reply's `nodes`, and where it has the key."""

    node: Count
    tier: Tier


class LookupReply(msgspec.Struct, frozen=True):
    """Who holds each key."""

    nodes: list[NodeInfo]
    holders: list[list[Replica]]


class NodeLoad(msgspec.Struct, frozen=True):
    info: NodeInfo
    num_free: Count
    num_keys: Count
    is_draining: bool = False


class NodesReply(msgspec.Struct, frozen=True):
    nodes: list[NodeLoad]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A node registered; it holds nothing yet."""

    info: NodeInfo


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """A node left, fell silent or registered anew: none of its keys count any more."""

    name: NodeName


class KeysChanged(msgspec.Struct, frozen=True, tag="keys"):
    """What a node holds from now on, and what no longer.

    `removed` may name keys that it was never known to hold.
    """

    name: NodeName
    added: Keys  # in DRAM
    removed: Keys
    on_ssd: Keys = []  # on SSD only


WatchEvent = Joined | Forgotten | KeysChanged


class WatchRequest(msgspec.Struct, frozen=True):
    """Everything after event `sequence` of directory `epoch`; epoch 0 asks for a snapshot."""

    epoch: Epoch
    sequence: Sequence


class WatchBatch(msgspec.Struct, frozen=True):
    """Some events, in order.

    With `snapshot` not "", they rebuild the state from nothing; it is whole at "last".

    An empty batch says that the directory lives and that nothing has happened.
    """

    epoch: Epoch
    sequence: Sequence  # of the last event the receiver then knows
    snapshot: Literal["", "more", "last"]
    events: list[WatchEvent]


class NodeReserve(msgspec.Struct, frozen=True):
    """Take a slot for each key; all objects have `nbytes` bytes, one crc32 per `part_nbytes` of them."""

    epoch: Epoch
    keys: Keys
    nbytes: ObjectSize
    part_nbytes: ObjectSize
    namespace: Namespace = ""  # by which all of them can be removed together


class Reserved(msgspec.Struct, frozen=True):
    refusal: Refusal  # "": accepted
    offset: Offset  # where to write it in the node's segment; 0 if refused


class ReserveReply(msgspec.Struct, frozen=True):
    """The writer must have committed `lease_seconds` after it asked; then the keys are free again, and no
    write is let in any more."""

    handle: Handle  # also the permit that its writes carry
    lease_seconds: float
    items: list[Reserved]


class CommitItem(msgspec.Struct, frozen=True):
    index: Count  # position of the key in the reservation
    crcs: Crcs  # computed by the writer from its own copy; the node compares them with what arrived


class CommitRequest(msgspec.Struct, frozen=True):
    epoch: Epoch
    handle: Handle
    items: Annotated[list[CommitItem], Meta(max_length=MAX_BATCH_KEYS)]


class Flags(msgspec.Struct, frozen=True):
    """One answer per item asked."""

    flags: list[bool]


class HandleRequest(msgspec.Struct, frozen=True):
    """Of a reservation (`abort`) or a lease (`release`).

    Unknown handles are over already, which is no error.
    """

    epoch: Epoch
    handle: Handle


class NodeKeys(msgspec.Struct, frozen=True):
    epoch: Epoch
    keys: Keys


class HeldBlock(msgspec.Struct, frozen=True):
    """An object that is not evicted while the lease lasts."""

    slot: Count
    offset: Offset
    generation: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    nbytes: ObjectSize
    part_nbytes: ObjectSize
    crcs: Crcs
    namespace: Namespace = ""


class LeaseReply(msgspec.Struct, frozen=True):
    handle: Handle
    lease_seconds: float
    held: list[HeldBlock | None]
    # items that are here, on SSD, and found no slot or no time to be read: try again without the others
    waiting: list[Count] = []


class NodeDrain(msgspec.Struct, frozen=True):
    """Whether the node takes nothing new from now on; what it holds can be read as before."""

    epoch: Epoch
    draining: bool


class NodeNamespace(msgspec.Struct, frozen=True):
    epoch: Epoch
    namespace: Namespace


class Counted(msgspec.Struct, frozen=True):
    count: Count


class NodeStats(msgspec.Struct, frozen=True):
    stats: dict[str, int]
    namespaces: dict[str, int]  # objects of each, in both tiers


DIRECTORY = Service(
    "mooncake.Directory",
    {
        # StaleError: this epoch of the name was replaced by another
        "register": Method(NodeInfo, RegisterReply),
        "heartbeat": Method(NodeBeat, Known),
        "announce": Method(Announce, Known),
        "leave": Method(NodeId, Empty),
        "lookup": Method(LookupRequest, LookupReply),
        "nodes": Method(Empty, NodesReply),
        "watch": Method(WatchRequest, WatchBatch, streams=True),  # ExhaustedError: too many watchers
    },
)

NODE = Service(
    "mooncake.Node",
    {
        "reserve": Method(NodeReserve, ReserveReply),
        # False: the bytes that arrived do not match. StaleError: too late
        "commit": Method(CommitRequest, Flags),
        "abort": Method(HandleRequest, Empty),
        "lease": Method(NodeKeys, LeaseReply),
        "release": Method(HandleRequest, Empty),
        "exists": Method(NodeKeys, Flags),
        "remove": Method(NodeKeys, Flags),
        # the node compares its own bytes with their crcs; damaged ones are removed
        "check": Method(NodeKeys, Flags),
        "drain": Method(NodeDrain, Empty),
        # removes every object of a namespace; how many there were
        "drop_namespace": Method(NodeNamespace, Counted),
        "stats": Method(Empty, NodeStats),
    },
)

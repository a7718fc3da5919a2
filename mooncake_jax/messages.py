"""The calls between roles: one table per service (see `kvstore.rpc`). The wire schema is the documentation.

Conductor: instances register and beat; frontends ask for placements and report how requests ended.
Prefill:   `prefill` streams `PrefillEvent`s; leaving the stream cancels the work and frees all it held.
Decode:    `reserve` → `generate` (streams `TokenEvent`s; leaving cancels) or `release`.
Every role answers `status` (readiness and its books: what is free, in use, leaked).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstore.block import BlockFormat
from kvstore.rpc import Empty, Method, Service
from mooncake_jax.request import (
    Count,
    DecodeRequest,
    Epoch,
    Instance,
    Name,
    Nbytes,
    Placement,
    PrefillEvent,
    PrefillRequest,
    Request,
    ReserveRequest,
    Seconds,
    StagingHandle,
    TokenEvent,
)

Role = Literal["prefill", "decode"]


class InstanceInfo(msgspec.Struct, frozen=True):
    """What a prefill or decode instance says of itself when it registers."""

    instance: Instance
    role: Role
    model: Name
    fingerprint: bytes  # weights + config + dtype + layout + block size; other fingerprints are other pools
    format: BlockFormat
    max_tokens: Count  # longest prompt + answer
    home_node: Name  # store node whose DRAM counts as this instance's own (Algorithm 1's prefix_len)
    host_id: Name
    num_slots: Count  # prefill: prompts in flight; decode: batch size
    kv_capacity_tokens: Count
    num_nodes: Annotated[int, Meta(ge=1, le=4096)] = 1  # X: how many nodes compute together here


class Fetched(msgspec.Struct, frozen=True):
    """A prefix that came from another store node, and how long its bytes took."""

    node: str
    nbytes: Nbytes
    seconds: Seconds


class InstanceLoad(msgspec.Struct, frozen=True):
    """What an instance says with every heartbeat. The request ids let the Conductor reconcile its bookings."""

    name: Name
    epoch: Epoch
    request_ids: list[Name]  # queued or running here
    queued_tokens: Count  # prefill: uncached tokens not yet computed
    used_slots: Count
    kv_tokens: Count  # decode: tokens held in the device cache
    tokens_per_second: float  # recent, while busy: prefill computed, decode generated; 0: none yet
    counters: dict[str, float]  # bytes moved by path, compiles after ready, ...: summed into /metrics
    fetches: list[Fetched] = []  # prefill: since the heartbeat before


class Beat(msgspec.Struct, frozen=True):
    """Reply to a heartbeat; `known` False asks the instance to register again (the Conductor restarted)."""

    known: bool


class PlaceRequest(msgspec.Struct, frozen=True):
    """Frontend → Conductor. `avoid` names instances that just failed this request."""

    request: Request
    avoid: list[Name] = []


class RequestEnd(msgspec.Struct, frozen=True):
    """Frontend → Conductor: a phase of a request ended, its booking is over. `ok` False rolls expected blocks back."""

    request_id: Name
    phase: Literal["prefill", "decode", "all"]
    ok: bool
    seconds: (
        Seconds  # prefill: `PrefillDone.prefill_seconds`, compared with the forecast; else how long it took
    )
    queue_seconds: Seconds = 0.0  # prefill: `PrefillDone.queue_seconds`
    # prefill: as in `FirstToken`, what was reused, which may be more or less than forecast; -1: as forecast
    cached_tokens: Annotated[int, Meta(ge=-1)] = -1
    fetched_tokens: Annotated[int, Meta(ge=-1)] = -1


class ClusterInfo(msgspec.Struct, frozen=True):
    """Conductor → frontend: who is alive, with the last load of each."""

    ready: bool  # at least one prefill and one decode instance of one fingerprint
    instances: list[InstanceInfo]
    loads: list[InstanceLoad]
    num_bookings: Count
    metrics: dict[str, float] = {}  # the Conductor's own: how far its forecasts are off, its threshold


class ExplainRequest(msgspec.Struct, frozen=True):
    """Why did this request go where it went?"""

    request_id: Name


class ConsideredPrefill(msgspec.Struct, frozen=True):
    """One prefill instance at the time of a decision."""

    name: str
    own_blocks: Count  # of the prompt, in its home node or soon there
    fetches: bool  # it would have fetched the best prefix
    transfer_seconds: float
    queue_seconds: float
    prefill_seconds: float
    verdict: str  # "chosen", or why not


class ConsideredDecode(msgspec.Struct, frozen=True):
    """One decode instance at the time of a decision."""

    name: str
    num_requests: Count
    kv_tokens: Count
    tbt_seconds: float  # after joining
    verdict: str


class Explanation(msgspec.Struct, frozen=True):
    """A decision with its reasons."""

    request_id: str
    outcome: str  # "placed", or why it was refused
    policy: str
    balancing_threshold: float
    num_tokens: Count
    max_tokens: Count
    best_blocks: Count
    holder: str  # of the best prefix
    retry_after_seconds: float
    prefill: list[ConsideredPrefill]
    decode: list[ConsideredDecode]


class RoleStatus(msgspec.Struct, frozen=True):
    """The books of a role: every entry is back at its start value when the role is idle."""

    ready: bool
    books: dict[str, float]


CONDUCTOR = Service(
    "mooncake.Conductor",
    {
        "register": Method(InstanceInfo, Beat),
        "heartbeat": Method(InstanceLoad, Beat),
        "place": Method(
            PlaceRequest, Placement
        ),  # RefusedError: SLO out of reach (429); UnavailableError: no instance (503)
        "end": Method(RequestEnd, Empty),
        "cluster": Method(Empty, ClusterInfo),
        "explain": Method(ExplainRequest, Explanation),  # NotFoundError: not among the last decisions
        "status": Method(Empty, RoleStatus),
    },
)

PREFILL = Service(
    "mooncake.Prefill",
    {
        "prefill": Method(PrefillRequest, PrefillEvent, streams=True),
        "status": Method(Empty, RoleStatus),
    },
)

DECODE = Service(
    "mooncake.Decode",
    {
        "reserve": Method(
            ReserveRequest, StagingHandle
        ),  # ExhaustedError: no room now; InvalidError: can never fit
        "release": Method(StagingHandle, Empty),
        "generate": Method(DecodeRequest, TokenEvent, streams=True),
        "status": Method(Empty, RoleStatus),
    },
)

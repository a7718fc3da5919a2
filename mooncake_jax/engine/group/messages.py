"""The calls between a prefill server and the members of its group."""

from __future__ import annotations

import msgspec

from kvstore.rpc import Empty, Method, Service
from kvstore.transfer.segment import Segment
from models.ticks import Chunk
from mooncake_jax.engine.contract import Sampled
from mooncake_jax.engine.stages import PipelinePlan
from mooncake_jax.request import Count, Epoch, Name, Sampling


class Join(msgspec.Struct, frozen=True):
    """A process asks to be member `index` of the next epoch. It stays one for as long as it reads the orders."""

    index: Count
    coordinator: Name  # host:port at which it could serve `jax.distributed`


class Form(msgspec.Struct, frozen=True, tag=True):
    """First order of an epoch: join `jax.distributed`, load, compile, and report order 0."""

    epoch: Epoch
    coordinator: Name
    num_members: Count


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Where new KV goes and prefix blocks come from (`landing`)."""

    segment: Segment


class RunTick(msgspec.Struct, frozen=True, tag=True):
    """The next tick; a member reports when the KV of its stages has landed and what was drawn."""

    number: Count
    area: Count  # of the landing memory
    chunks: list[Chunk | None]  # of each stage
    tokens: bytes  # int32, of the chunk that enters stage 0
    sample: Sampling | None = None  # draw after the chunk on the last stage
    prompt: bytes = b""  # int32, for a sample that looks back


class InsertPrefix(msgspec.Struct, frozen=True, tag=True):
    """Cached blocks for the cache of a stage, which lie in the landing memory; reported when they were read."""

    number: Count
    stage: Count
    slot: Count
    first_page: Count
    num_blocks: Count


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Empty all caches. Not reported."""


Order = Form | Attach | RunTick | InsertPrefix | Reset


class Report(msgspec.Struct, frozen=True):
    """Order `number` is done at member `index`, or went wrong: then `error` says how, and the epoch ends."""

    epoch: Epoch
    index: Count
    number: Count
    compiles: Count = 0
    plan: PipelinePlan | None = None  # with order 0
    stages: list[Count] = []  # with order 0: those whose layers it has
    sampled: Sampled | None = None
    error: str = ""


GROUP = Service(
    "mooncake.PrefillGroup",
    {"join": Method(Join, Order, streams=True), "report": Method(Report, Empty)},
)

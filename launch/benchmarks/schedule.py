"""Suite `schedule`: what one placement costs the Conductor, on one core.

- `decide_N`: from the keys of a prompt of 131,072 tokens (512 blocks) to the decision, over N prefill instances and N/4
  decode instances, with 1,000,000 blocks in the index: FindBestPrefixMatch and Algorithm 1, without hashing, booking and
  logging. Every instance holds a leading run of the prompt, its length drawn evenly from 0 to 512: the index walks the
  whole chain, and nearly every instance has another length;
- `schedule_small_N`: `schedule` alone, on a prompt of 24 blocks;
- `find_prefix`: FindBestPrefixMatch alone over 16 nodes. Prompt i of the population (`--trace`, else a generated one of
  conversations) is stored at node i % 16, then all are looked up; Dynamo's radix tree holds and finds the same;
- `hash_32k`: the keys of a prompt of 32,768 token ids (a list, as it comes off the wire) in blocks of 256, beside
  Dynamo's block hashes of the same list. Ours are chained and 128 bits of BLAKE2b; Dynamo's are not chained, 64 bits of
  a hash that is not cryptographic.

All in µs per call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvstore.block import KEY_NBYTES, BlockFormat, chain_keys, root_key
from kvstore.directory.index import PrefixIndex
from launch.benchmarks.options import Options
from launch.benchmarks.peers import DynamoPeer
from launch.benchmarks.prompts import generate, traced
from launch.benchmarks.record import Row, measure
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.config import ConductorConfig, ScheduleConfig
from mooncake_jax.conductor.decision import PrefixLengths, RequestFeatures
from mooncake_jax.conductor.decision_log import DecisionLog
from mooncake_jax.conductor.schedule import schedule
from mooncake_jax.messages import InstanceInfo, InstanceLoad, Role
from mooncake_jax.request import Instance, Request

CLUSTERS, SMALL_CLUSTERS = (16, 128, 1024), (16, 256)
LONG_BLOCKS, SMALL_BLOCKS = 512, 24
FORMAT = BlockFormat(30, 3, 64, 256, "bfloat16", 6)
NUM_FIND_NODES, NUM_FIND_PROMPTS = 16, 4000
HASH_TOKENS = 32_768


@dataclass(frozen=True)
class Load:
    """How much of everything a round does."""

    num_indexed: int = 1_000_000
    num_calls: int = 500
    num_prompts: int = NUM_FIND_PROMPTS
    num_hashes: int = 20


class Pool:
    """A Conductor with `num` prefill instances of different queues, and an index of what their nodes hold."""

    def __init__(self, num: int, num_indexed: int):
        rng = random.Random(num)
        config = ConductorConfig()
        self.conductor = Conductor(config, DecisionLog(config.schedule, num_records=16))
        self.index = PrefixIndex()
        self.keys = _keys(range(LONG_BLOCKS))
        self.request = Request("bench", [1] * (LONG_BLOCKS * FORMAT.block_tokens), 64)
        for i in range(num):
            self._join(f"p{i}", "prefill", rng.randrange(20_000))
            self.index.add(f"p{i}", self.keys[: rng.randint(0, LONG_BLOCKS)])
            self.index.add(f"p{i}", _keys(range(LONG_BLOCKS + i, num_indexed, num)))
        for i in range(max(1, num // 4)):
            self._join(f"d{i}", "decode", 0)

    def _join(self, name: str, role: Role, queued_tokens: int) -> None:
        info = InstanceInfo(
            instance=Instance(name, "127.0.0.1:1", 1),
            role=role,
            model="bench",
            fingerprint=b"bench",
            format=FORMAT,
            max_tokens=200_000,
            home_node=name,
            host_id=name,
            num_slots=8,
            kv_capacity_tokens=1_600_000,
        )
        self.conductor.register(info, 0.0)
        load = InstanceLoad(name, 1, [], queued_tokens, 0, 0, 0.0, {})
        self.conductor.heartbeat(load, 0.0)

    def decide(self) -> None:
        """From keys to a decision, as the Conductor's service does it."""
        held = self.index.lengths(self.keys)
        self.conductor.decide(self.request, self.keys, held, now=0.0)

    def schedule_small(self) -> Callable[[], object]:
        """`schedule` on a prompt of `SMALL_BLOCKS` blocks, everything else made before."""
        Z, view = FORMAT.block_tokens, self.conductor.view
        features = RequestFeatures(SMALL_BLOCKS * Z, 64, Z, FORMAT.nbytes)
        local = np.random.default_rng(0).integers(0, SMALL_BLOCKS, len(view.prefill.names))
        match, config = PrefixLengths(local, int(local.max()), "p0"), ScheduleConfig()
        return lambda: schedule(view, features, match, config, now=0.0, draws=(0.5, 0.5))


def run(options: Options) -> list[Row]:
    load = Load(100_000, 50, 500, 2) if options.quick else Load()
    with ExitStack() as stack:
        peer = (
            stack.enter_context(DynamoPeer(options.peers))
            if options.peers and DynamoPeer.installed(options.peers)
            else None
        )
        return schedule_rows(options, load, peer)


def schedule_rows(options: Options, load: Load, peer: DynamoPeer | None) -> list[Row]:
    """The rows that `options` wants, ours and `peer` under the same `load`."""
    rows: list[Row] = []

    def add(name: str, ours: Callable[[], float], theirs: Callable[[], float] | None = None) -> None:
        peer_name = peer.name if peer and theirs else None
        rows.append(measure(name, "µs", "lower", ours, theirs, peer_name, rounds=options.rounds))

    for num in CLUSTERS:
        if options.wants(f"decide_{num}"):
            pool = Pool(num, load.num_indexed)
            add(f"decide_{num}", lambda pool=pool: _microseconds(pool.decide, load.num_calls))
    for num in SMALL_CLUSTERS:
        if options.wants(f"schedule_small_{num}"):
            call = Pool(num, 0).schedule_small()
            add(f"schedule_small_{num}", lambda call=call: _microseconds(call, load.num_calls))
    if options.wants("find_prefix"):
        _add_find_prefix(add, options, load, peer)
    if options.wants("hash_32k"):
        tokens = np.random.default_rng(1).integers(0, 128_000, HASH_TOKENS).tolist()
        root, Z = root_key(b"bench"), FORMAT.block_tokens
        add(
            "hash_32k",
            lambda: _microseconds(lambda: chain_keys(root, tokens, Z), load.num_hashes),
            (lambda: peer.hash_seconds(tokens, Z, load.num_hashes) * 1e6) if peer else None,
        )
    return rows


def _add_find_prefix(add: Callable[..., None], options: Options, load: Load, peer: DynamoPeer | None) -> None:
    chains = traced(options.trace, load.num_prompts) if options.trace else generate(load.num_prompts)
    index, keys = PrefixIndex(), [_keys(chain) for chain in chains]
    for i, chain in enumerate(keys):
        index.add(f"node-{i % NUM_FIND_NODES}", chain)
    if peer:
        peer.store(chains, NUM_FIND_NODES)

    def find_all() -> None:
        for chain in keys:
            index.lengths(chain)

    add(
        "find_prefix",
        lambda: _microseconds(find_all, 1) / len(chains),
        (lambda: peer.find_seconds() / len(chains) * 1e6) if peer else None,
    )


def _keys(ids: range | list[int]) -> list[bytes]:
    return [i.to_bytes(KEY_NBYTES, "little") for i in ids]


def _microseconds(call: Callable[[], object], num_calls: int) -> float:
    """Mean time of a call."""
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls * 1e6

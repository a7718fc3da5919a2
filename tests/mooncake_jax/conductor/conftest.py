"""A cluster of made-up instances around the real `Conductor`, driven by hand: time is a number."""

import itertools

import pytest

from kvstore.block import BlockFormat, chain_keys, root_key
from kvstore.directory import PrefixIndex
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.config import ConductorConfig, ScheduleConfig
from mooncake_jax.conductor.decision_log import DecisionLog, replay
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.messages import Fetched, InstanceInfo, InstanceLoad, RequestEnd
from mooncake_jax.request import Instance, Placement, Request

Z = 16
FORMAT = BlockFormat(2, 1, 4, Z, "float32", 1)
FINGERPRINT = b"weights of the test"
COST = CostModel(
    prefill_base_seconds=0.0,
    prefill_seconds_per_token=1e-3,
    prefill_seconds_per_pair=0.0,
    prefill_seconds_per_prefix_token=0.0,
    transfer_base_seconds=0.0,
    transfer_nbytes_per_second=1e9,
)


def make_info(name: str, role="prefill", epoch=1, **changes) -> InstanceInfo:
    fields = {
        "instance": Instance(name, f"127.0.0.1:{epoch}", epoch),
        "role": role,
        "model": "tiny",
        "fingerprint": FINGERPRINT,
        "format": FORMAT,
        "max_tokens": 4096,
        "home_node": f"{name}-home",
        "host_id": "host",
        "num_slots": 8,
        "kv_capacity_tokens": 8 * 4096,
    }
    return InstanceInfo(**{**fields, **changes})


def make_load(name: str, epoch=1, request_ids=(), **changes) -> InstanceLoad:
    idle = {"queued_tokens": 0, "used_slots": 0, "kv_tokens": 0, "tokens_per_second": 0.0}
    fetches = [Fetched(*fetched) for fetched in changes.pop("fetches", ())]
    return InstanceLoad(name, epoch, list(request_ids), **{**idle, **changes}, counters={}, fetches=fetches)


class Cluster:
    """Instances p0, p1, … and d0, d1, … of one pool, and an index of what their nodes hold."""

    def __init__(self, prefill=2, decode=2, schedule=None, instances=None, **config):
        schedule = schedule or ScheduleConfig(cost=COST)
        self.config = ConductorConfig(schedule=schedule, **config)
        self.log = DecisionLog(schedule, num_records=self.config.num_logged_decisions)
        self.conductor = Conductor(self.config, self.log)
        self.index = PrefixIndex()
        self.now = 1000.0
        self._ids = itertools.count()
        self.names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
        for name in self.names:
            self.register(name, **(instances or {}))

    def register(self, name: str, **changes) -> None:
        role = "prefill" if name.startswith("p") else "decode"
        self.conductor.register(make_info(name, role, **changes), self.now)

    def beat(self, name: str, **load) -> bool:
        return self.conductor.heartbeat(make_load(name, **load), self.now)

    def beat_all(self) -> None:
        for name in self.names:
            assert self.beat(name)

    def keys(self, tokens) -> list[bytes]:
        return chain_keys(root_key(FINGERPRINT), tokens, Z)

    def hold(self, node: str, tokens, tier="dram") -> None:
        self.index.add(node, self.keys(tokens), tier)

    def place(self, tokens, max_tokens=16, request_id=None, avoid=()) -> Placement:
        request = Request(request_id or f"r{next(self._ids)}", list(tokens), max_tokens)
        keys = self.keys(tokens)
        held = self.index.lengths(keys)
        on_ssd = self.index.num_on_ssd(keys, held)
        continued = self.index.continued(keys, held)
        return self.conductor.place(
            request, keys, held, on_ssd=on_ssd, continued=continued, avoid=avoid, now=self.now
        )

    def end(self, request_id: str, phase="all", ok=True, seconds=0.0, **told) -> None:
        self.conductor.end(RequestEnd(request_id, phase, ok, seconds, **told), self.now)

    def queue_seconds(self) -> list[float]:
        return [max(0.0, until - self.now) for until in self.conductor.view.prefill.busy_until.tolist()]

    def replays(self, config: ScheduleConfig) -> bool:
        """Every decision comes out again, from the log and `config` alone."""
        decided = list(replay(config, self.log.records()))
        return bool(decided) and all(record.decision == decision for record, decision in decided)

    @property
    def open_books(self) -> dict[str, float]:
        """What is not back at its start value."""
        return {k: v for k, v in self.conductor.books.items() if v and not k.endswith("_instances")}


@pytest.fixture
def make_cluster():
    """`Cluster(...)`; when the test is over every booking must go by itself, once nobody mentions it."""
    clusters = []

    def make(**arguments) -> Cluster:
        clusters.append(Cluster(**arguments))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.now += cluster.config.booking_seconds + cluster.config.expected_block_seconds + 1.0
        cluster.conductor.tick(cluster.now)
        cluster.conductor.tick(cluster.now)
        assert cluster.open_books == {}


@pytest.fixture
def cluster_type():
    """`Cluster`, for tests that build their own."""
    return Cluster


@pytest.fixture
def instance_info():
    """`make_info`, for tests that register over the wire."""
    return make_info


@pytest.fixture
def instance_load():
    """`make_load`."""
    return make_load

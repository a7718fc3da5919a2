"""Where a prefix comes from, and what is left of it when something is missing."""

import threading

import numpy as np
import pytest
from fakes.engine import FORMAT

from kvstore import Client, Directory, Node, NodeConfig, chain_keys, root_key
from kvstore.rpc import Server
from kvstore.transfer import Faults, TransferEngine
from mooncake_jax.prefill.fetch import PrefixLostError
from mooncake_jax.prefill.fetch_times import FetchTimes
from mooncake_jax.prefill.prefix import Prefix, Source, plan_sources
from mooncake_jax.request import Instance, Placement

Z = FORMAT.block_tokens
TOKENS = list(range(8 * Z + 1))
KEYS = chain_keys(root_key(b"fingerprint"), TOKENS, Z)


def placement(fetch_blocks: int = 0, fetch_from: str = "") -> Placement:
    nobody = Instance("x", "x:1", 1)
    return Placement("r", nobody, nobody, KEYS, 0, fetch_blocks, fetch_from, 0.0, 0.0)


def sources(held: str, *, fetch_blocks=0, fetch_from="", **nodes: str) -> list[Source]:
    """`held` and each node: one character per block, "x" where it holds it."""
    names = {name.replace("_", "-"): text for name, text in nodes.items()} | {"home": held}
    at = {key: [name for name, text in names.items() if text[i] == "x"] for i, key in enumerate(KEYS)}
    return plan_sources(
        KEYS,
        [c == "x" for c in held],
        placement(fetch_blocks, fetch_from),
        lambda keys: [at[key] for key in keys],
        "home",
    )


def test_all_at_home_or_nowhere_needs_no_source():
    assert sources("xxxxxxxx") == []
    assert sources("........") == []
    assert sources("xx......", n1="........") == []


def test_the_conductor_decides_what_is_fetched():
    assert sources("xx......", fetch_blocks=5, fetch_from="n1", n1="xxxxx...") == [Source("n1", [2, 3, 4])]
    assert sources("x.x.....", fetch_blocks=4, fetch_from="n1", n1="xxxx....") == [Source("n1", [1, 3])]
    assert sources("........", fetch_blocks=4, fetch_from="home") == []
    assert sources("xx......", n1="xxxxx...") == [], "Algorithm 1 saw n1 and did not choose it"


def test_the_answer_of_the_turn_before_continues_the_prefix():
    assert sources("xxx.....", d0="...xxx..") == [Source("d0", [3, 4, 5])]
    assert sources("xxx.....", d0="...x....", d1="...xxx..") == [Source("d1", [3, 4, 5])]
    assert sources("xxx.....", d0="....xx..") == [], "a gap ends the prefix"
    assert sources("........", fetch_blocks=3, fetch_from="n1", n1="xxx.....", d0="...xxx..") == [
        Source("n1", [0, 1, 2]),
        Source("d0", [3, 4, 5]),
    ]


class Store:
    """A home node with a client, and another node; their engines are on different hosts unless `one_host`."""

    def __init__(self, home_slots: int = 16):
        self.directory = Directory()
        self.servers = [Server(self.directory.handlers(), max_workers=32)]
        self.engines = {name: TransferEngine(host_id=name) for name in ("home", "other")}
        slots = {"home": home_slots, "other": 16}
        self.nodes = {
            name: Node(NodeConfig(name, name, slots[name] * FORMAT.nbytes, FORMAT.nbytes), engine)
            for name, engine in self.engines.items()
        }
        for node in self.nodes.values():
            self.servers.append(Server(node.handlers()))
            node.join(self.servers[0].address, self.servers[-1].address)
            assert node.flush(10.0)
        self.home, self.other = self.nodes.values()
        self.client = Client(self.servers[0].address, engine=self.engines["home"], home=self.home)
        assert self.client.replica.wait_in_sync(10.0)
        self.blocks = np.random.default_rng(0).integers(0, 2**16, (8, *FORMAT.shape), FORMAT.item_dtype)
        self.progress = threading.Semaphore(0)
        self.times = FetchTimes()

    def put(self, node: Node, blocks: range) -> None:
        with node.reserve([KEYS[i] for i in blocks], FORMAT.nbytes, FORMAT.group_nbytes) as slots:
            assert all(slots.accepted)
            for at, i in enumerate(blocks):
                slots.buffer(at)[:] = self.blocks[i].tobytes()
                slots.commit(at)

    def prefix(self, fetch_blocks: int, num_tokens: int = len(TOKENS)) -> Prefix:
        decided = placement(fetch_blocks, "other" if fetch_blocks else "")
        return Prefix(self.home, self.client, FORMAT, decided, num_tokens, self.progress.release, self.times)

    def ready(self, prefix: Prefix) -> Prefix:
        while not prefix.is_ready:
            assert self.progress.acquire(timeout=10)
        return prefix

    def check_bytes(self, prefix: Prefix) -> None:
        for group in range(FORMAT.num_groups):
            layers = slice(2 * group, 2 * group + 2)
            assert (np.stack(prefix.load(group)) == self.blocks[: prefix.num_blocks, layers]).all()

    def close(self) -> None:
        for node in self.nodes.values():
            stats = node.stats()
            assert (stats["leases"], stats["reserved"]) == (0, 0)
            node.validate()
        self.client.close()
        for server in self.servers[1:]:
            server.close()
        for node in self.nodes.values():
            node.close()
        self.servers[0].close()
        self.directory.close()
        for engine in self.engines.values():
            engine.close()


@pytest.fixture
def store():
    store = Store()
    yield store
    store.close()


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (Z, 0), (Z + 1, 1), (3 * Z, 2), (3 * Z + 1, 3), (8 * Z, 3)]
)
def test_at_least_one_token_is_computed(store, num_tokens, expected):
    store.put(store.home, range(3))
    prefix = store.prefix(0, num_tokens)
    assert prefix.is_ready
    assert prefix.begin() == prefix.num_home_blocks == expected
    assert prefix.num_fetched == 0
    if expected:
        store.check_bytes(prefix)
    prefix.close()


def test_home_and_fetched_blocks_make_one_prefix(store):
    store.put(store.home, range(2))
    store.put(store.other, range(5))
    prefix = store.prefix(5)
    assert prefix.expected_blocks == 5
    store.ready(prefix)
    assert (prefix.begin(), prefix.num_fetched) == (5, 3)
    store.check_bytes(prefix)
    blocks, _ = prefix.whole_blocks(0, 5)
    assert (np.stack(blocks) == store.blocks[:5].reshape(5, -1).view(np.uint8)).all()
    assert store.home.exists(KEYS) == [True] * 5 + [False] * 3, "fetched blocks are replicas from now on"
    assert store.home.stats()["leased"] == 5
    prefix.close()


def test_what_the_other_node_lost_ends_the_prefix(store):
    store.put(store.other, range(5))
    store.other.remove([KEYS[3]])
    prefix = store.ready(store.prefix(5))
    assert (prefix.begin(), prefix.num_fetched) == (3, 3)
    store.check_bytes(prefix)
    prefix.close()


def test_a_fetch_that_fails_at_once_leaves_what_is_at_home(store):
    store.put(store.home, range(2))
    store.put(store.other, range(5))
    store.engines["home"].faults = Faults(dead=True)
    prefix = store.ready(store.prefix(5))
    assert (prefix.begin(), prefix.num_fetched) == (2, 0)
    store.check_bytes(prefix)
    prefix.close()


def test_a_fetch_that_fails_under_way_is_told_to_who_loads(store):
    store.put(store.home, range(2))
    store.put(store.other, range(5))
    begun = threading.Event()
    reads = []

    def second_group(request) -> bool:
        reads.append(request)
        return len(reads) > 3 and begun.wait(10)

    store.engines["home"].faults = Faults(dead=True, only=second_group)
    prefix = store.ready(store.prefix(5))
    assert prefix.begin() == 5
    begun.set()
    assert (np.stack(prefix.load(0)) == store.blocks[:5, :2]).all()
    with pytest.raises(PrefixLostError, match="layer group 1 did not arrive"):
        prefix.load(1)
    assert (prefix.begin(), prefix.num_fetched) == (2, 0)
    store.check_bytes(prefix)
    prefix.close()
    assert store.home.exists(KEYS[2:5]) == [False] * 3


def test_a_fetched_block_that_is_evicted_before_it_is_leased_is_lost(store):
    store.put(store.other, range(2))
    lease = store.home.lease

    def too_late(keys):
        if threading.current_thread().name == "prefix-fetch":
            store.home.remove(keys[:1])
        return lease(keys)

    store.home.lease = too_late
    prefix = store.ready(store.prefix(2))
    usable = prefix.begin() > 0
    if usable:  # the fetch was still under way
        with pytest.raises(PrefixLostError):
            prefix.load(FORMAT.num_groups - 1)
        assert prefix.begin() == 0
    prefix.close()
    del store.home.lease


def test_without_room_at_home_fetched_blocks_are_still_used():
    store = Store(home_slots=2)
    store.put(store.other, range(5))
    prefix = store.ready(store.prefix(5))
    assert (prefix.begin(), prefix.num_fetched) == (5, 5)
    store.check_bytes(prefix)
    prefix.close()
    assert store.home.exists(KEYS[:3]) == [True, True, False]
    store.close()


def test_blocks_that_came_home_while_it_queued_are_found(store):
    prefix = store.prefix(0)
    assert prefix.expected_blocks == 0
    store.put(store.home, range(4))
    assert prefix.begin() == 4
    prefix.close()


def test_close_ends_a_fetch_under_way(store):
    store.put(store.other, range(5))
    reading, go = threading.Event(), threading.Event()

    def gate(request) -> bool:
        reading.set()
        return not go.wait(10)

    store.engines["home"].faults = Faults(only=gate)
    prefix = store.prefix(5)
    assert reading.wait(10)
    assert not prefix.is_ready
    prefix.stop()
    go.set()
    prefix.close()
    assert store.home.exists(KEYS) == [False] * 8


def test_a_fetch_tells_how_long_its_bytes_took(store):
    store.put(store.other, range(4))
    prefix = store.ready(store.prefix(4))
    assert prefix.begin() == 4
    store.check_bytes(prefix)
    prefix.close()
    (fetched,), num_told = store.times.since(0)
    assert (fetched.node, fetched.nbytes) == ("other", 4 * FORMAT.nbytes)
    assert 0.0 < fetched.seconds < 60.0
    assert store.times.since(num_told) == ([], num_told)
    store.times.add("third", 1, 2.0)
    assert [one.node for one in store.times.since(num_told)[0]] == ["third"]
    assert [one.node for one in store.times.since(0)[0]] == ["other", "third"]  # to another Conductor

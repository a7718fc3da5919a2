"""Prefill that dies or restarts, hits that cannot be loaded, an index that is lost (public cases 10, 11, 47, 48, 53).

Reported as sgl-project/sglang#12779 and #9726, vllm-project/aibrix#2289 (a dead prefill takes decode with it);
ai-dynamo/nixl#795 and vllm-project/vllm#49238 (a prefill restarted on its address is never spoken to again);
vllm-project/vllm#49176, LMCache/LMCache#1690 (a hit that cannot be loaded, for ever); kvcache-ai/Mooncake#1336, #2246,
#1871, #1150 (a restarted master); ai-dynamo/dynamo#11646, #1056 and #14652 (affinity to the dead, an index that never
comes back).
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from e2e.cluster import LocalCluster, wait_until
from fakes.engine import FORMAT, FakeDecodeEngine, FakePrefillEngine, answer

from kvstore import DirectoryReplica
from kvstore.rpc import Empty, Server, Stub
from launch.replaying.prompts import Line
from launch.replaying.targets import ConductorTarget, replay
from mooncake_jax.conductor.config import ConductorConfig
from mooncake_jax.conductor.service import ConductorService
from mooncake_jax.messages import CONDUCTOR, DECODE, PlaceRequest
from mooncake_jax.request import Request

Z = FORMAT.block_tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(31 * i + 7 * seed + i * i) % 200 for i in range(length)]


def ignore(outcome):
    pass


def test_10_a_prefill_that_dies_takes_nobody_with_it():
    """16 requests in flight, one of two prefills dies: all are answered by the other; decode stays ready."""
    started = threading.Event()
    engine = lambda: FakePrefillEngine(  # noqa: E731
        seconds_per_token=0.002, before_group=lambda slot, start, group: started.set()
    )
    cluster = LocalCluster(num_prefill=2, num_decode=1, prefill_engine=engine)
    try:
        lines = [Line(i, 0.0, prompt(40, seed=i), 3) for i in range(16)]
        with ThreadPoolExecutor(1) as pool:
            target = ConductorTarget(cluster.conductor.address)
            running = pool.submit(lambda: asyncio.run(replay(target, lines, ignore)))
            assert started.wait(60)
            cluster.instances["prefill-0"].close()
            outcomes = running.result(timeout=120)
        decode = cluster.stub(cluster.instances["decode-0"].address, DECODE)
        assert decode.status(Empty()).ready
        assert [one.status for one in outcomes] == ["ok"] * 16, [one.error for one in outcomes]
        assert {one.prefill for one in outcomes} >= {"prefill-1"}
        later = cluster.ask(prompt(40, seed=99), avoid=["prefill-0"])
        assert later.tokens == answer(prompt(40, seed=99), 6)
        wait_until(lambda: decode.status(Empty()).books["open_requests"] == 0, "decode is idle")
    finally:
        cluster.close()


def test_11_a_prefill_that_restarts_under_its_name_serves_at_once():
    """Within a heartbeat period, with a new epoch; decode is not restarted, and the old epoch is refused."""
    cluster = LocalCluster(num_prefill=1, num_decode=1)
    try:
        first = cluster.ask(prompt(30))
        old = first.placement.prefill
        cluster.restart("prefill-0", FakePrefillEngine())
        wait_until(
            lambda: any(
                info.role == "prefill" and info.instance.epoch != old.epoch
                for info in cluster.conductor.cluster(Empty()).instances
            ),
            "the new process is registered",
        )
        for i in range(5):
            got = cluster.ask(prompt(30, seed=i))
            assert got.tokens == answer(prompt(30, seed=i), 6)
            assert got.placement.prefill.epoch != old.epoch
    finally:
        cluster.close()


def test_47_a_hit_that_cannot_be_loaded_is_recomputed_by_one_request_alone():
    """The only holder loses its blocks between the placement and the load; nothing else happens on the system."""
    with LocalCluster(num_prefill=2, num_decode=1) as cluster:
        tokens = prompt(8 * Z + 1)
        here = cluster.ask(tokens).placement.prefill.name
        cluster.wait_held(here, tokens, range(8))
        call = cluster.call(tokens)
        placement = call.place(avoid=[here])
        assert (placement.fetch_from, placement.fetch_blocks) == (here, 8)
        cluster.instances[here].home.remove(placement.keys)
        handle = call.reserve(placement)
        first, _ = call.prefill(placement, handle)
        assert (first.cached_tokens, first.fetched_tokens) == (0, 0)
        events = call.generate(placement, handle, first.token)
        assert [first.token, *(t for event in events for t in event.tokens)] == answer(tokens, 6)
        call.end(ok=True)
        wait_until(
            lambda: cluster.call(tokens).place(avoid=[placement.prefill.name]).fetch_from != here,
            "the bad location is dropped",
        )
        for booking in range(1, 200):  # what only asked where it would go
            cluster.end(f"request-{booking}")


def test_48_and_53_a_restarted_conductor_has_the_index_back():
    """A Conductor that knows nothing follows the directory, and gives the same holder; decode need not restart."""
    with LocalCluster(num_prefill=2, num_decode=1, decode_engine=FakeDecodeEngine) as cluster:
        tokens = prompt(8 * Z + 1)
        here = cluster.ask(tokens).placement.prefill.name
        cluster.wait_held(here, tokens, range(8))
        replica = DirectoryReplica(cluster.directory_address)
        service = ConductorService(ConductorConfig(), replica)
        server = Server(service.handlers())
        stub = Stub(server.address, CONDUCTOR)
        try:
            for instance in cluster.instances.values():
                stub.register(instance.info)
            assert replica.wait_in_sync(60.0)
            placement = stub.place(PlaceRequest(Request("r", tokens, 3)))
            assert (placement.prefill.name, placement.local_blocks) == (here, 8)
            away = stub.place(PlaceRequest(Request("s", tokens, 3), avoid=[here]))
            assert (away.fetch_from, away.fetch_blocks) == (here, 8)
        finally:
            stub.close()
            server.close()
            service.close()


def test_53_a_new_empty_node_gets_no_hits_of_the_dead_one():
    cluster = LocalCluster(num_prefill=2, num_decode=1)
    try:
        tokens = prompt(8 * Z + 1)
        here = cluster.ask(tokens).placement.prefill.name
        cluster.wait_held(here, tokens, range(8))
        cluster.restart(here, FakePrefillEngine())
        wait_until(
            lambda: cluster.call(tokens).place().fetch_from != here, "the dead one's blocks are forgotten"
        )
        for i in range(10):
            got = cluster.ask([*tokens, i])
            assert got.tokens == answer([*tokens, i], 6)
            assert got.first.cached_tokens == 0 or i > 0
    finally:
        cluster.close()

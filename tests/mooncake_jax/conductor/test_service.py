"""The Conductor over real gRPC: typed errors, the watch stream, silence, and many callers at once."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.directory import Directory, DirectoryReplica
from kvstore.errors import InvalidError, NotFoundError, RefusedError, StaleError, UnavailableError
from kvstore.messages import DIRECTORY, Announce, NodeId, NodeInfo
from kvstore.rpc import Empty, Server, Stub
from kvstore.transfer.segment import Peer, Segment
from mooncake_jax.conductor.config import ConductorConfig, ScheduleConfig
from mooncake_jax.conductor.decision_log import read_decision_log, replay
from mooncake_jax.conductor.service import ConductorService
from mooncake_jax.messages import CONDUCTOR, ExplainRequest, PlaceRequest, RequestEnd
from mooncake_jax.request import Request

ROOT = Path(__file__).parents[3]
DEADLINE_SECONDS = 20.0


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        pause.wait(0.01)


@pytest.fixture
def serve():
    """`serve(config, **arguments) -> (stub, service)`; everything is closed afterwards."""
    closing = []

    def start(config=None, **arguments):
        service = ConductorService(config or ConductorConfig(), **arguments)
        service.start()
        server = Server(service.handlers())
        stub = Stub(server.address, CONDUCTOR)
        closing.extend([service.close, server.close, stub.close])
        return stub, service

    yield start
    for close in reversed(closing):
        close()


@pytest.fixture
def pair(instance_info):
    return instance_info("p0"), instance_info("d0", "decode")


def place(stub, request_id="r", tokens=range(100), max_tokens=8, **changes):
    return stub.place(PlaceRequest(Request(request_id, list(tokens), max_tokens, **changes)))


def test_a_request_from_placement_to_end(serve, pair, instance_load):
    stub, service = serve()
    with pytest.raises(UnavailableError, match="no instance"):
        place(stub)
    assert not stub.cluster(Empty()).ready
    for info in pair:
        assert stub.register(info).known
    placement = place(stub)
    assert (placement.prefill, placement.decode) == (pair[0].instance, pair[1].instance)
    assert len(placement.keys) == 6
    assert place(stub, "other tenant", salt="s").keys != placement.keys
    assert stub.heartbeat(instance_load("p0", request_ids=["r"], queued_tokens=100, used_slots=1)).known
    assert not stub.heartbeat(instance_load("stranger")).known
    cluster = stub.cluster(Empty())
    assert cluster.ready
    assert cluster.instances == list(pair)
    assert [load.queued_tokens for load in cluster.loads] == [100, 0]
    assert cluster.num_bookings == 2
    for request_id in ("r", "other tenant"):
        stub.end(RequestEnd(request_id, "all", False, 0.0))
    status = stub.status(Empty())
    assert status.ready
    assert status.books == {
        "bookings": 0,
        "prefill_bookings": 0,
        "decode_bookings": 0,
        "expected_blocks": 0,
        "prefill_instances": 1,
        "decode_instances": 1,
    }
    assert [record.request_id for record in service.decisions()] == ["r", "other tenant"]


def test_a_decision_is_explained_over_the_wire_and_by_the_command(serve, pair):
    stub, _ = serve(ConductorConfig(heartbeat_seconds=1000.0))
    for info in pair:
        stub.register(info)
    place(stub)
    explanation = stub.explain(ExplainRequest("r"))
    assert (explanation.outcome, explanation.prefill[0].verdict) == ("placed", "chosen")
    with pytest.raises(NotFoundError, match="'nobody'"):
        stub.explain(ExplainRequest("nobody"))
    command = [sys.executable, "-m", "launch.conductor_ctl", f"--conductor={stub.address}"]
    shown = subprocess.run([*command, "explain", "r"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "r: placed, policy global" in shown.stdout
    shown = subprocess.run([*command, "status"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "p0 " in shown.stdout
    assert "bookings                             1" in shown.stdout
    stub.end(RequestEnd("r", "all", False, 0.0))


def test_errors_cross_the_wire_as_themselves(serve, pair, instance_info):
    slo = ConductorConfig(schedule=ScheduleConfig(ttft_slo_seconds=0.15))
    stub, _ = serve(slo, clock=lambda: 100.0)
    for info in pair:
        stub.register(info)
    with pytest.raises(InvalidError, match="fingerprint"):
        stub.register(instance_info("p1", fingerprint=b"other"))
    with pytest.raises(InvalidError, match="5000 tokens"):
        place(stub, tokens=range(5000))
    place(stub, "first")
    with pytest.raises(RefusedError) as refused:
        place(stub, "second", tokens=range(1000, 1100))
    assert 0.0 < refused.value.retry_after_seconds < 0.15
    stub.register(instance_info("p0", epoch=2))
    with pytest.raises(StaleError, match="replaced"):
        stub.register(pair[0])


def test_the_directory_tells_where_blocks_are(serve, pair):
    directory = Directory()
    server = Server(directory.handlers(), max_workers=8)
    replica = DirectoryReplica(server.address)
    heard = Listener()
    replica.subscribe(heard)
    store = Stub(server.address, DIRECTORY)
    try:
        stub, _ = serve(prefixes=replica)
        for info in pair:
            stub.register(info)
        keys = place(stub).keys
        stub.end(RequestEnd("r", "all", False, 0.0))
        segment = Segment(Peer(7, "host", []), "slots", 1 << 20)
        store.register(NodeInfo("store-1", 7, "127.0.0.1:1", "host", segment, 16, 1024))
        store.announce(Announce("store-1", 7, 1, keys, [], 10))
        assert heard.added.wait(DEADLINE_SECONDS)
        placement = place(stub)
        assert (placement.fetch_from, placement.fetch_blocks, placement.local_blocks) == ("store-1", 6, 0)
        stub.end(RequestEnd("r", "all", False, 0.0))
        store.leave(NodeId("store-1", 7))
        assert heard.forgotten.wait(DEADLINE_SECONDS)
        assert place(stub).fetch_from == ""
    finally:
        replica.close()
        store.close()
        directory.close()
        server.close()


class Listener:
    """Notes that keys came and that a node went."""

    def __init__(self):
        self.added, self.forgotten = threading.Event(), threading.Event()

    def on_joined(self, info):
        pass

    def on_added(self, node, keys):
        self.added.set()

    def on_removed(self, node, keys):
        pass

    def on_forgotten(self, node):
        self.forgotten.set()


def test_the_config_names_the_directory_and_close_leaves_it(serve):
    directory = Directory()
    server = Server(directory.handlers(), max_workers=8)
    try:
        _, service = serve(ConductorConfig(directory_address=server.address))
        service.close()
        service.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "directory-replica"]
    finally:
        directory.close()
        server.close()


def test_silence_drops_an_instance(serve, pair, instance_load):
    clock = [100.0]
    stub, _ = serve(ConductorConfig(heartbeat_seconds=0.02), clock=lambda: clock[0])
    for info in pair:
        stub.register(info)
    place(stub)
    clock[0] += 0.05
    assert stub.heartbeat(instance_load("d0")).known
    clock[0] += 0.02
    until(lambda: not stub.cluster(Empty()).ready)
    assert [info.instance.name for info in stub.cluster(Empty()).instances] == ["d0"]
    with pytest.raises(UnavailableError, match="no prefill"):
        place(stub, "s")
    assert stub.status(Empty()).books["prefill_bookings"] == 0


def test_many_callers_at_once_leave_nothing_behind(serve, instance_info, tmp_path):
    path = tmp_path / "decisions.jsonl"
    stub, service = serve(ConductorConfig(decision_log_path=str(path)))
    for i in range(4):
        stub.register(instance_info(f"p{i}"))
        stub.register(instance_info(f"d{i}", "decode"))

    def one(i: int) -> str:
        placement = place(stub, f"r{i}", tokens=range(i % 7 * 16 + 40))
        stub.end(RequestEnd(f"r{i}", "prefill", i % 3 > 0, 0.01))
        stub.end(RequestEnd(f"r{i}", "decode", True, 0.01))
        return placement.prefill.name

    with ThreadPoolExecutor(8) as pool:
        used = list(pool.map(one, range(120)))
    assert set(used) == {"p0", "p1", "p2", "p3"}
    books = stub.status(Empty()).books
    assert books["bookings"] == books["prefill_bookings"] == books["decode_bookings"] == 0
    service.close()
    config, records = read_decision_log(path)
    assert len(records) == 120
    assert all(record.decision == decision for record, decision in replay(config, records))

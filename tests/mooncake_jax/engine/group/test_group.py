"""A group of members, here threads with fake stages: the server's engine gives right answers, and survives its members."""

import threading

import pytest
from e2e.cluster import LocalCluster, wait_until
from fakes.engine import answer
from fakes.stages import FakeStages, fake_cache, fake_plan

from kvstore.errors import InvalidError, StaleError, UnavailableError
from kvstore.rpc import Server, Stub
from kvstore.transfer import TransferEngine
from mooncake_jax.engine.contract import EngineLostError
from mooncake_jax.engine.group.group import MemberGroup
from mooncake_jax.engine.group.member import Member
from mooncake_jax.engine.group.messages import GROUP, Join, Report
from mooncake_jax.engine.group.remote_stages import RemoteStages
from mooncake_jax.engine.pipeline_prefill import PipelinePrefillEngine

PLAN = fake_plan(num_stages=2)


class World:
    """The devices of one epoch: members meet in every tick, and who waits for one that is gone waits in vain."""

    def __init__(self, num_members):
        self.cache = fake_cache(PLAN)
        self.barrier = threading.Barrier(num_members)


class Members:
    """`num` members that join again whenever they end, each in a thread of its own."""

    def __init__(self, address, num, host_id=lambda index: "here"):
        self.address, self.num, self.host_id = address, num, host_id
        self.worlds: dict[int, World] = {}
        self.stages: dict[int, FakeStages] = {}
        self.members: dict[int, Member] = {}
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._keep, args=(i,)) for i in range(num)]
        for thread in self._threads:
            thread.start()

    def world(self, epoch):
        with self._lock:
            return self.worlds.setdefault(epoch, World(self.num))

    def _keep(self, index):
        while not self.closed.is_set():
            ended = threading.Event()
            worlds = []

            def end(reason, ended=ended, worlds=worlds):
                ended.set()
                for world in worlds:
                    world.barrier.abort()  # a process that ends breaks its collectives

            def build(form, worlds=worlds):
                worlds.append(self.world(form.epoch))
                own = [s for s in range(PLAN.num_stages) if s * self.num // PLAN.num_stages == index]
                stages = FakeStages(
                    PLAN, worlds[0].cache, own_stages=own, meet=lambda: worlds[0].barrier.wait(60)
                )
                self.stages[index] = stages
                return stages

            transfer = TransferEngine(host_id=self.host_id(index))
            member = Member(
                self.address,
                Join(index, "127.0.0.1:1"),
                transfer=transfer,
                build=build,
                on_ready=lambda epoch: None,
                end=end,
            )
            self.members[index] = member

            threading.Thread(target=member.run, daemon=True).start()
            ended.wait()
            member._stub.close()
            transfer.close()
            self.closed.wait(0.05)

    def hang_up(self, index):
        """As the end of its process would: its stream of orders breaks off."""
        self.members[index]._stub.close()

    def close(self):
        self.closed.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def text(length, seed):
    return [(seed * 31 + i * 7) % 250 for i in range(length)]


class Scene:
    """A group, its members, and a cluster whose prefill instance it is."""

    def __init__(self, num_members):
        self.group = MemberGroup(num_members, step_seconds=60)
        self.server = Server([(GROUP, self.group)], max_workers=24)
        self.members = Members(self.server.address, num_members, lambda index: f"host-{index % 2}")
        self.transfer = TransferEngine(host_id="host-0")
        self.stages: RemoteStages | None = None

    def has_formed(self):
        try:
            self.group.wait_ready(0.05)
        except EngineLostError:
            return False
        return True

    def cluster(self):
        return LocalCluster(
            num_prefill=1, num_decode=1, prefill_engine=lambda: PipelinePrefillEngine(self.stages)
        )

    def __enter__(self):
        try:
            wait_until(self.has_formed, "the group is ready")
        except BaseException:
            self.__exit__()
            raise
        self.stages = RemoteStages(self.group, self.transfer)
        return self

    def __exit__(self, *_):
        self.members.closed.set()
        if self.stages is not None:
            self.stages.close()
        self.group.close()
        self.server.close()
        self.members.close()
        self.transfer.close()


@pytest.mark.parametrize("num_members", [1, 2])
def test_a_group_answers_as_one_process_does(num_members):
    with Scene(num_members) as scene, scene.cluster() as cluster:
        prompt = text(41, 3)
        assert cluster.ask(prompt).tokens == answer(prompt, 6)
        cluster.wait_held("prefill-0", prompt, range(10))
        longer = [*prompt, *text(30, 4)]
        again = cluster.ask(longer)
        assert again.first.cached_tokens == 40
        assert again.tokens == answer(longer, 6)


@pytest.mark.parametrize("how", ["an error in its step", "it ends without a word"])
def test_a_lost_member_fails_what_is_under_way_and_the_next_epoch_serves(how):
    with Scene(2) as scene, scene.cluster() as cluster:
        prompt = text(60, 1)
        lost, ticks = scene.members.stages[1], []

        def fail():
            ticks.append(1)
            if len(ticks) == 4:
                if how == "it ends without a word":
                    scene.members.hang_up(1)
                raise RuntimeError("the device is gone")

        lost.before_tick = fail
        with pytest.raises(UnavailableError, match="prefill group lost its epoch 1: member 1"):
            cluster.ask(prompt)
        wait_until(lambda: scene.group.epoch == 2, "an epoch begins")

        def serves():
            try:
                return cluster.ask(prompt).tokens == answer(prompt, 6)
            except UnavailableError:
                return False

        wait_until(serves, "the group serves again")
        assert scene.members.stages[1] is not lost


def test_a_request_while_the_group_is_down_is_refused_at_once_and_the_store_goes_on():
    with Scene(2) as scene, scene.cluster() as cluster:
        prompt = text(40, 1)
        cluster.ask(prompt)
        cluster.wait_held("prefill-0", prompt, range(10))
        scene.members.closed.set()  # nobody joins again
        scene.members.hang_up(0)
        wait_until(lambda: not scene.stages.is_ready, "the epoch has ended")
        with pytest.raises(UnavailableError):
            cluster.ask(prompt)
        wait_until(lambda: not scene.stages.is_ready, "still down")
        with pytest.raises(UnavailableError, match="not ready"):
            cluster.ask(prompt)
        held = cluster.instances["decode-0"].client.exists(cluster.keys(prompt), fresh=True)
        assert held == [True] * 10


def test_what_a_group_refuses():
    group = MemberGroup(2)
    server = Server([(GROUP, group)])
    stub = Stub(server.address, GROUP)
    with pytest.raises(InvalidError, match="member 2 of a group of 2"):
        list(stub.join(Join(2, "here:1")))
    with pytest.raises(StaleError, match="epoch 3"):
        stub.report(Report(3, 0, 0))
    with pytest.raises(EngineLostError, match="0 of 2 members"):
        group.wait_ready(0.01)
    group.close()
    with pytest.raises(StaleError, match="closed"):
        list(stub.join(Join(0, "here:1")))
    stub.close()
    server.close()


def test_members_of_different_models_do_not_serve_together():
    group = MemberGroup(2)
    server = Server([(GROUP, group)])
    stubs = [Stub(server.address, GROUP) for _ in range(2)]
    orders = [iter(stub.join(Join(i, "here:1"))) for i, stub in enumerate(stubs)]
    firsts = [None, None]
    waiting = threading.Thread(target=lambda: firsts.__setitem__(0, next(orders[0])))
    waiting.start()
    firsts[1] = next(orders[1])
    waiting.join()
    assert firsts[0] == firsts[1]
    stubs[0].report(Report(1, 0, 0, plan=fake_plan(2), stages=[0]))
    stubs[1].report(Report(1, 1, 0, plan=fake_plan(2, chunk_tokens=8), stages=[1]))
    assert list(orders[0]) == list(orders[1]) == []
    with pytest.raises(EngineLostError, match="member 1 has another model or mesh"):
        group.wait_ready(0.01)
    for stub in stubs:
        stub.close()
    group.close()
    server.close()


def test_a_member_that_leaves_while_others_are_awaited_is_no_loss():
    group = MemberGroup(2)
    server = Server([(GROUP, group)])
    stub = Stub(server.address, GROUP)
    first = stub.join(Join(0, "here:1"))
    wait_until(lambda: len(group._members) == 1, "it joined")
    first.cancel()
    wait_until(lambda: not group._members, "it left")
    assert group.epoch == 0
    group.close()
    stub.close()
    server.close()

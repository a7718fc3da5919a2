"""An instance stays known: before the Conductor is there, after it restarted, in spite of faults."""

import threading
import time

import pytest

from kvstore.block import BlockFormat
from kvstore.errors import InternalError, InvalidError, UnavailableError
from kvstore.rpc import Empty, Server
from mooncake_jax.conductor.config import ConductorConfig
from mooncake_jax.conductor.service import ConductorService
from mooncake_jax.membership import Membership
from mooncake_jax.messages import InstanceInfo, InstanceLoad
from mooncake_jax.request import Instance

DEADLINE_SECONDS = 20.0
BEAT_SECONDS = 0.02


def info(name="p0", fingerprint=b"f") -> InstanceInfo:
    instance = Instance(name, "127.0.0.1:1", 7)
    block_format = BlockFormat(2, 1, 4, 16, "float32", 1)
    return InstanceInfo(instance, "prefill", "tiny", fingerprint, block_format, 4096, "home", "host", 4, 4096)


def load(name="p0", queued_tokens=0) -> InstanceLoad:
    return InstanceLoad(name, 7, [], queued_tokens, 0, 0, 0.0, {})


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        pause.wait(0.01)


class Running:
    """A Conductor on a port."""

    def __init__(self, port=0):
        self.service = ConductorService(ConductorConfig())
        self.server = Server(self.service.handlers(), port=port)
        self.address, self.port = self.server.address, self.server.port

    @property
    def queued_tokens(self) -> dict[str, int]:
        return {load.name: load.queued_tokens for load in self.service.cluster(Empty()).loads}

    def close(self):
        self.server.close()
        self.service.close()


@pytest.fixture
def closing():
    """A list of things to close afterwards, last first."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("membership")]


def join(closing, address, **changes) -> Membership:
    arguments = {"info": info(), "load": load, "interval_seconds": BEAT_SECONDS, **changes}
    membership = Membership(address, **arguments)
    closing.append(membership)
    return membership


def test_registers_and_sends_its_load_again_and_again(closing):
    conductor = Running()
    closing.append(conductor)
    queued = [5]
    membership = join(closing, conductor.address, load=lambda: load(queued_tokens=queued[0]))
    assert membership.registered.wait(DEADLINE_SECONDS)
    until(lambda: conductor.queued_tokens == {"p0": 5})
    queued[0] = 6
    until(lambda: conductor.queued_tokens == {"p0": 6})
    assert membership.last_error is None


def test_waits_for_the_conductor_and_outlives_its_restart(closing):
    first = Running()
    first.close()
    membership = join(closing, first.address, load=lambda: load(queued_tokens=3))
    until(lambda: isinstance(membership.last_error, UnavailableError))
    assert not membership.registered.is_set()

    second = Running(first.port)
    until(lambda: second.queued_tokens == {"p0": 3})
    second.close()

    third = Running(first.port)
    closing.insert(0, third)
    until(lambda: third.queued_tokens == {"p0": 3})
    assert membership.registered.is_set()
    assert membership.last_error is None


def test_a_refused_registration_is_told_and_tried_again(closing):
    conductor = Running()
    closing.append(conductor)
    join(closing, conductor.address)
    until(lambda: conductor.queued_tokens)
    stranger = join(closing, conductor.address, info=info("p1", b"other"), load=lambda: load("p1"))
    until(lambda: isinstance(stranger.last_error, InvalidError))
    assert "fingerprint" in str(stranger.last_error)
    assert not stranger.registered.is_set()
    assert set(conductor.queued_tokens) == {"p0"}


def test_a_fault_of_the_load_does_not_end_the_beats(closing):
    conductor = Running()
    closing.append(conductor)
    answers = iter([ZeroDivisionError("broken"), None])

    def faulty():
        error = next(answers, None)
        if error:
            raise error
        return load(queued_tokens=9)

    membership = join(closing, conductor.address, load=faulty)
    until(lambda: conductor.queued_tokens == {"p0": 9})
    assert membership.last_error is None or isinstance(membership.last_error, InternalError)


def test_close_is_final_and_may_be_repeated(closing):
    conductor = Running()
    closing.append(conductor)
    membership = join(closing, conductor.address, interval_seconds=3600.0)
    assert membership.registered.wait(DEADLINE_SECONDS)
    membership.close()
    membership.close()
    assert not membership.registered.is_set()


def test_an_interval_must_be_positive():
    with pytest.raises(ValueError, match="interval_seconds"):
        Membership("127.0.0.1:1", info(), load, interval_seconds=0.0)

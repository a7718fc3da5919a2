"""The request path over real RPC: retries, refusals, and books that are back at zero whatever happened."""

import asyncio
import time
from contextlib import aclosing, contextmanager

import pytest
from fakes.roles import FakeRoles, full

from kvstore.errors import (
    ExhaustedError,
    InternalError,
    InvalidError,
    RefusedError,
    StoreError,
    UnavailableError,
)
from mooncake_jax.frontend.backend import Started
from mooncake_jax.frontend.dispatch import Dispatcher
from mooncake_jax.frontend.metrics import Metrics
from mooncake_jax.request import PrefillDone, Request, TokenEvent

CLEAN = {"bookings": 0, "staged": 0, "streams": 0}


@contextmanager
def balanced(roles):
    """At the end, all that was taken has been given back."""
    try:
        yield roles
        deadline = time.monotonic() + 10
        while roles.books != CLEAN and time.monotonic() < deadline:
            time.sleep(0.005)
        assert roles.books == CLEAN
    finally:
        roles.close()


@pytest.fixture
def roles():
    with balanced(FakeRoles()) as roles:
        yield roles


def dispatch(roles, use, **options):
    """Run `use(dispatcher)` in a loop of its own."""

    async def run():
        dispatcher = Dispatcher(roles.address, **options)
        await dispatcher.start()
        try:
            return await use(dispatcher)
        finally:
            await dispatcher.close()

    return asyncio.run(run())


def ask(roles, *, max_tokens=5, stop=(), avoid=(), **options):
    request = Request("r1", [1, 2, 3], max_tokens, stop_token_ids=list(stop))
    events = []

    async def use(dispatcher):
        async with aclosing(dispatcher.generate(request, avoid)) as stream:
            async for event in stream:
                events.append(event)

    try:
        dispatch(roles, use, **options)
    except StoreError as error:
        return events, error
    return events, None


def answer(events):
    parts = [event for event in events if isinstance(event, TokenEvent)]
    assert all(part.finish is None for part in parts[:-1])
    return [t for part in parts for t in part.tokens], parts[-1].finish if parts else None


def test_the_whole_path(roles):
    events, error = ask(roles)
    assert error is None
    assert events[0] == Started("prefill-0", "decode-0", 4, 2)
    assert events[1] == TokenEvent([4], [-0.25])
    assert isinstance(events[2], PrefillDone)
    assert answer(events) == ([4, 5, 6, 7, 8], "length")
    assert roles.calls == [
        ("place", ()),
        ("reserve", "decode-0"),
        ("prefill", "prefill-0", True),
        ("end", "prefill", True),
        ("end", "decode", True),
    ]


def test_a_stop_token_of_decode_ends_the_answer(roles):
    assert answer(ask(roles, max_tokens=50, stop=[9, 7])[0]) == ([4, 5, 6, 7], "stop")


def test_a_first_token_that_ends_the_answer_starts_no_decode(roles):
    assert answer(ask(roles, stop=[4])[0]) == ([4], "stop")
    assert ("release", "decode-0") in roles.calls
    assert ("end", "prefill", True) in roles.calls, "prefill was not left to store its blocks"
    assert roles.streams.keys() == {"prefill"}


@pytest.mark.parametrize(("stop", "reason"), [([], "length"), ([4], "stop")])
def test_one_token_needs_no_staging(roles, stop, reason):
    assert answer(ask(roles, max_tokens=1, stop=stop)[0]) == ([4], reason)
    assert [call[0] for call in roles.calls] == ["place", "prefill", "end", "end"]


@pytest.mark.parametrize("gate", ["prefill.start", "reserve"])
def test_a_failure_before_the_first_token_is_tried_elsewhere(gate):
    with balanced(FakeRoles(num_decode=2)) as roles:
        roles.gates.fail[gate] = [UnavailableError("dying")]
        events, error = ask(roles)
    failed = "prefill-0" if gate == "prefill.start" else "decode-0"
    assert error is None
    assert answer(events) == ([4, 5, 6, 7, 8], "length")
    assert [call for call in roles.calls if call[0] == "place"] == [("place", ()), ("place", (failed,))]
    assert ("end", "all", False) in roles.calls


def test_a_dead_prefill_is_avoided(roles):
    roles.stop("prefill-0")
    events, error = ask(roles)
    assert error is None
    assert events[0].prefill == "prefill-1"


def test_the_callers_avoid_list_is_kept(roles):
    events, _ = ask(roles, avoid=["prefill-0"])
    assert events[0].prefill == "prefill-1"


def test_after_the_first_token_a_failure_is_the_answer(roles):
    roles.gates.fail["prefill.done"] = [InternalError("lost a layer group")]
    events, error = ask(roles)
    assert answer(events) == ([4], None)
    assert "lost a layer group" in str(error)
    roles.gates.fail["decode.step"] = [InternalError("lost the batch")]
    events, error = ask(roles)
    assert answer(events) == ([4, 5], None)
    assert "lost the batch" in str(error)


def test_decode_without_room_is_waited_for(roles):
    roles.gates.fail["reserve"] = full(3)
    events, error = ask(roles)
    assert error is None
    assert answer(events)[1] == "length"
    assert [call[0] for call in roles.calls].count("place") == 1


def test_decode_without_room_for_too_long_is_exhausted(roles):
    roles.gates.fail["reserve"] = full()
    events, error = ask(roles, reserve_patience_seconds=0.1)
    assert isinstance(error, ExhaustedError)
    assert events == []


@pytest.mark.parametrize(
    ("gate", "error"),
    [
        ("place", RefusedError("over the SLO", 7.5)),
        ("place", UnavailableError("nobody here")),
        ("reserve", InvalidError("can never fit")),
        ("prefill.start", InvalidError("too long")),
    ],
)
def test_what_is_not_retried(roles, gate, error):
    roles.gates.fail[gate] = [error]
    events, got = ask(roles)
    assert type(got) is type(error)
    assert events == []
    assert [call[0] for call in roles.calls].count("place") == (0 if gate == "place" else 1)
    if isinstance(got, RefusedError):
        assert got.retry_after_seconds == 7.5


@pytest.mark.parametrize(
    "gate", ["place", "reserve", "prefill.start", "prefill.done", "decode.start", "decode.step"]
)
def test_cancelling_at_any_point_gives_everything_back(roles, gate):
    roles.gates.hold.add(gate)

    async def consume(dispatcher):
        async with aclosing(dispatcher.generate(Request("r1", [1, 2, 3], 5))) as events:
            async for _ in events:
                pass

    async def use(dispatcher):
        task = asyncio.create_task(consume(dispatcher))
        await asyncio.to_thread(roles.gates.wait_for, gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if gate in ("place", "reserve"):  # the call goes on at the other side; its result must not be lost
            roles.gates.released.set()

    dispatch(roles, use)


def test_cancelling_a_generate_that_never_reached_decode_gives_the_staging_memory_back(roles, monkeypatch):
    async def use(dispatcher):
        sent = asyncio.Event()

        async def lost(request):
            sent.set()
            await asyncio.Event().wait()
            yield

        def stub(role, address, found=dispatcher.stub):
            stub = found(role, address)
            monkeypatch.setattr(stub, "generate", lost, raising=False)
            return stub

        monkeypatch.setattr(dispatcher, "stub", stub)

        async def consume():
            async with aclosing(dispatcher.generate(Request("r1", [1, 2, 3], 5))) as events:
                async for _ in events:
                    pass

        task = asyncio.create_task(consume())
        await asyncio.wait_for(sent.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    dispatch(roles, use)


@pytest.mark.parametrize(("gate", "last"), [("prefill.done", 4), ("decode.step", 5)])
def test_closing_the_generator_leaves_the_streams(roles, gate, last):
    roles.gates.hold.add(gate)

    async def use(dispatcher):
        async with aclosing(dispatcher.generate(Request("r1", [1, 2, 3], 500))) as events:
            async for event in events:
                if isinstance(event, TokenEvent) and event.tokens == [last]:
                    break

    dispatch(roles, use)


def test_without_a_conductor(roles):
    roles._servers[-1].close(0)

    async def use(dispatcher):
        assert dispatcher.cluster is None
        assert dispatcher.max_tokens is None
        with pytest.raises(UnavailableError):
            async for _ in dispatcher.generate(Request("r1", [1], 5)):
                pass

    dispatch(roles, use)


def test_the_cluster_is_followed_and_shown_in_metrics(roles):
    async def use(dispatcher):
        deadline = time.monotonic() + 10
        while dispatcher.cluster is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert dispatcher.max_tokens == 100, "the shortest of the instances' limits"
        return Metrics(lambda: dispatcher.cluster).render().decode()

    metrics = dispatch(roles, use)
    assert (
        'mooncake_moved_bytes{instance="prefill-0",operation="read",path="tcp",role="prefill"} 7.0' in metrics
    )
    assert 'mooncake_instance_compiles_after_ready{instance="decode-0",role="decode"} 0.0' in metrics
    assert "mooncake_cluster_ready 1.0" in metrics

"""Typed RPC: what is malformed never reaches a handler, and a domain error arrives as itself."""

import asyncio
import threading

import grpc
import msgpack
import msgspec
import pytest

from kvstore.errors import STATUS, InternalError, InvalidError, NotFoundError, RefusedError, UnavailableError
from kvstore.rpc import AsyncStub, Empty, Method, Server, Service, Stub, domain_error


class Ask(msgspec.Struct, frozen=True):
    name: str
    count: int = 1


class Answer(msgspec.Struct, frozen=True):
    text: str


SERVICE = Service(
    "test.Echo",
    {
        "say": Method(Ask, Answer),
        "fail": Method(Ask, Answer),
        "count": Method(Ask, Answer, streams=True),
        "lie": Method(Ask, Answer),
    },
)


class Echo:
    def __init__(self):
        self.left = threading.Event()

    def say(self, ask: Ask) -> Answer:
        return Answer(ask.name * ask.count)

    def fail(self, ask: Ask) -> Answer:
        if ask.name == "refused":
            raise RefusedError("queue is full", retry_after_seconds=7.5)
        if ask.name == "bug":
            raise ZeroDivisionError("one over none")
        raise next(error for error in STATUS if error.__name__ == ask.name)("told so")

    def count(self, ask: Ask, context: grpc.ServicerContext):
        context.add_callback(self.left.set)
        for i in range(ask.count):
            yield Answer(str(i))
        if ask.name == "fail":
            raise NotFoundError("half way")

    def lie(self, ask: Ask) -> object:
        return Empty()


@pytest.fixture
def echo():
    handler = Echo()
    server = Server([(SERVICE, handler)])
    stub = Stub(server.address, SERVICE)
    yield handler, server, stub
    stub.close()
    server.close()


def test_unary_and_stream(echo):
    _, _, stub = echo
    assert stub.say(Ask("ab", 2)) == Answer("abab")
    assert [a.text for a in stub.count(Ask("x", 3))] == ["0", "1", "2"]


@pytest.mark.parametrize("error", list(STATUS))
def test_every_domain_error_arrives_as_itself_and_names_the_peer(echo, error):
    _, server, stub = echo
    with pytest.raises(error, match=f"test.Echo.fail at {server.address}: ") as caught:
        stub.fail(Ask("refused" if error is RefusedError else error.__name__))
    assert type(caught.value) is error


def test_refusal_carries_its_retry_after(echo):
    with pytest.raises(RefusedError) as caught:
        echo[2].fail(Ask("refused"))
    assert caught.value.retry_after_seconds == 7.5


@pytest.mark.parametrize(
    ("raw", "seconds"), [("7.5", 7.5), (b"0", 0.0), ("", 1), ("soon", 1), ("nan", 1), ("-1", 1), ("1e30", 1)]
)
def test_a_retry_after_that_is_no_sensible_number_counts_as_none(raw, seconds):
    class Foreign(grpc.RpcError):
        def code(self):
            return STATUS[RefusedError]

        def details(self):
            return "full"

        def trailing_metadata(self):
            return (("retry-after-seconds", raw),)

    error = domain_error(Foreign(), "there")
    assert isinstance(error, RefusedError)
    assert (str(error), error.retry_after_seconds) == ("there: full", seconds)


def test_a_closed_stub_is_unavailable(echo):
    stub = Stub(echo[1].address, SERVICE)
    stub.close()
    with pytest.raises(UnavailableError, match=r"test\.Echo\.say at .*closed"):
        stub.say(Ask("ok"))


def test_a_bug_in_a_handler_is_an_internal_error_and_the_server_goes_on(echo, caplog):
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        echo[2].fail(Ask("bug"))
    assert echo[2].say(Ask("ok")) == Answer("ok")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x00" * 10,
        msgpack.packb({"name": 3}),
        msgpack.packb({"count": 1}),
        msgpack.packb([1, 2]),
        b"\x91" * 100_000,
    ],
)
def test_malformed_messages_are_invalid_and_never_reach_the_handler(echo, raw):
    _, server, _ = echo
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/test.Echo/say")
        with pytest.raises(grpc.RpcError) as caught:
            call(raw, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_wire_is_plain_messagepack(echo):
    _, server, _ = echo
    with grpc.insecure_channel(server.address) as channel:
        reply = channel.unary_unary("/test.Echo/say")(msgpack.packb({"name": "a", "count": 3}), timeout=5)
    assert msgpack.unpackb(reply) == {"text": "aaa"}


def test_a_malformed_reply_is_an_internal_error(echo):
    with pytest.raises(InternalError, match="malformed reply"):
        echo[2].lie(Ask("x"))


def test_leaving_a_stream_is_noticed_by_the_server(echo):
    handler, _, stub = echo
    replies = stub.count(Ask("x", 10**9))
    next(iter(replies))
    replies.cancel()
    assert handler.left.wait(5)


def test_an_error_in_a_stream_comes_after_what_was_sent(echo):
    got = []
    with pytest.raises(NotFoundError, match="half way"):
        got.extend(answer.text for answer in echo[2].count(Ask("fail", 2)))
    assert got == ["0", "1"]


def test_nobody_there_is_unavailable():
    stub = Stub("127.0.0.1:1", SERVICE)
    with pytest.raises(UnavailableError):
        stub.say(Ask("x"))
    stub.close()


def test_a_taken_port_is_an_os_error(echo):
    with pytest.raises(OSError, match="cannot bind"):
        Server([(SERVICE, Echo())], port=echo[1].port)


def test_asyncio_stub(echo):
    handler, server, _ = echo

    async def run():
        stub = AsyncStub(server.address, SERVICE)
        assert await stub.say(Ask("ab", 2)) == Answer("abab")
        assert [a.text async for a in stub.count(Ask("x", 3))] == ["0", "1", "2"]
        with pytest.raises(InvalidError, match="told so"):
            await stub.fail(Ask("InvalidError"))
        handler.left.clear()

        async def consume():
            async for _ in stub.count(Ask("x", 10**9)):
                await asyncio.sleep(0)

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stub.close()

    asyncio.run(run())
    assert handler.left.wait(5)

"""gRPC services as typed tables: MessagePack structs in, MessagePack structs out, validated at the edge.

A service is a `Service` table; a handler is any object with a method of each name. Unary methods take the request;
methods that stream take `(request, context)` and yield replies, so that they notice when the caller has left.
Block bytes never travel here: they go through `kvstore.transfer`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import grpc
import grpc.aio
import msgspec

from kvstore.errors import (
    DEFAULT_RETRY_AFTER_SECONDS,
    ERRORS,
    STATUS,
    InternalError,
    InvalidError,
    RefusedError,
    StoreError,
    UnavailableError,
)
from kvstore.health import health_handler

MAX_MESSAGE_NBYTES = 16 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_RETRY_AFTER = "retry-after-seconds"
_LONGEST_RETRY_AFTER_SECONDS = 86_400.0
log = logging.getLogger(__name__)


class Method(NamedTuple):
    """One call: its request and reply types, and whether replies stream."""

    request: Any  # a msgspec struct, or a union of tagged ones
    reply: Any
    streams: bool = False


class Service(NamedTuple):
    """A named table of calls, e.g. `Service("mooncake.Directory", {"lookup": Method(LookupRequest, LookupReply)})`."""

    name: str
    methods: dict[str, Method]


class Empty(msgspec.Struct, frozen=True):
    """A request or reply without fields."""


def _decoder(kind: type) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(raw: bytes) -> Any:
        try:
            return decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return InvalidError(f"{kind.__name__}: {error}")

    return checked


_encode = msgspec.msgpack.Encoder().encode


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    if not isinstance(error, StoreError):
        log.exception("unexpected error in a handler", exc_info=error)
        error = InternalError(f"{type(error).__name__}: {error}")
    if isinstance(error, RefusedError):
        context.set_trailing_metadata(((_RETRY_AFTER, f"{error.retry_after_seconds:.3f}"),))
    context.abort(STATUS[type(error)], str(error))


def _unary(call: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            if isinstance(request, InvalidError):
                raise request
            return call(request)
        except Exception as error:
            _abort(context, error)

    return handle


def _stream(call: Callable[[Any, grpc.ServicerContext], Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            if isinstance(request, InvalidError):
                raise request
            yield from call(request, context)
        except Exception as error:
            _abort(context, error)

    return handle


class Server:
    """A started gRPC server; `port` is the bound one. The only place where servers are assembled.

    It answers the standard health service too.
    """

    def __init__(
        self,
        handlers: list[tuple[Service, object]],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_workers: int = 32,
    ):
        """Bind and start. Raises OSError when the address is taken."""
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="rpc")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        for service, handler in handlers:
            table = {}
            for name, method in service.methods.items():
                kind = (
                    grpc.unary_stream_rpc_method_handler
                    if method.streams
                    else grpc.unary_unary_rpc_method_handler
                )
                wrap = _stream if method.streams else _unary
                table[name] = kind(
                    wrap(getattr(handler, name)),
                    request_deserializer=_decoder(method.request),
                    response_serializer=_encode,
                )
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.name, table),)
            )
        self._server.add_generic_rpc_handlers((health_handler([service.name for service, _ in handlers]),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot bind {address}: {error}") from error
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._server.start()

    def close(self, grace_seconds: float = 0.5) -> None:
        """Stop accepting, give running calls `grace_seconds`, and join the pool."""
        self._server.stop(grace_seconds).wait()
        self._pool.shutdown(wait=True, cancel_futures=True)


def domain_error(error: grpc.RpcError, where: str) -> StoreError:
    """The domain error that a failed call stands for, with the peer named in its message."""
    call = cast(Any, error)  # every RpcError of a call is a grpc.Call too
    kind = ERRORS.get(call.code(), InternalError)
    message = f"{where}: {call.details()}"
    if kind is RefusedError:
        trailing = dict(call.trailing_metadata() or ())
        return RefusedError(message, _retry_after_seconds(trailing.get(_RETRY_AFTER)))
    return kind(message)


def _retry_after_seconds(raw: str | bytes | None) -> float:
    """What the peer asks to wait; the default for anything but a number of seconds from 0 to a day."""
    try:
        seconds = float(raw or "")
    except ValueError:
        return DEFAULT_RETRY_AFTER_SECONDS
    return seconds if 0 <= seconds <= _LONGEST_RETRY_AFTER_SECONDS else DEFAULT_RETRY_AFTER_SECONDS


class Stub:
    """Calls of one service at one address: `stub.lookup(request, timeout=2.0)`; failures raise `StoreError`s.

    A streaming call returns an iterator with `cancel()`.
    """

    def __init__(self, address: str, service: Service, *, timeout_seconds: float = 5.0):
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        for name, method in service.methods.items():
            factory = self._channel.unary_stream if method.streams else self._channel.unary_unary
            call = factory(
                f"/{service.name}/{name}",
                request_serializer=_encode,
                response_deserializer=_decoder(method.reply),
            )
            where = f"{service.name}.{name} at {address}"
            if method.streams:
                setattr(
                    self,
                    name,
                    lambda request, timeout=None, _c=call, _w=where: _Replies(
                        _c(request, timeout=timeout), _w
                    ),
                )
            else:
                setattr(self, name, self._checked(call, where, timeout_seconds))

    @staticmethod
    def _checked(call: Callable[..., Any], where: str, default_timeout: float) -> Callable[..., Any]:
        def checked(request: Any, timeout: float | None = None) -> Any:
            try:
                return _valid(call(request, timeout=default_timeout if timeout is None else timeout))
            except grpc.RpcError as error:
                raise domain_error(error, where) from error
            except ValueError as error:  # gRPC's word for a channel that was closed
                raise UnavailableError(f"{where}: {error}") from error

        return checked

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no call {name!r} in this service")

    def close(self) -> None:
        self._channel.close()


def _valid(reply: Any) -> Any:
    if isinstance(reply, InvalidError):
        raise InternalError(f"malformed reply: {reply}")
    return reply


class _Replies:
    def __init__(self, call: Any, where: str):
        self._call, self._where = call, where

    def __iter__(self) -> Iterator[Any]:
        try:
            for reply in self._call:
                yield _valid(reply)
        except grpc.RpcError as error:
            raise domain_error(error, self._where) from error

    def cancel(self) -> None:
        self._call.cancel()


class AsyncStub:
    """`Stub` for asyncio: await unary calls, `async for` streaming ones; cancelling the task cancels the call."""

    def __init__(self, address: str, service: Service, *, timeout_seconds: float = 5.0):
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        for name, method in service.methods.items():
            factory = self._channel.unary_stream if method.streams else self._channel.unary_unary
            call = factory(
                f"/{service.name}/{name}",
                request_serializer=_encode,
                response_deserializer=_decoder(method.reply),
            )
            wrap = self._streaming if method.streams else self._awaited
            setattr(self, name, wrap(call, f"{service.name}.{name} at {address}", timeout_seconds))

    @staticmethod
    def _awaited(call: Callable[..., Any], where: str, default_timeout: float) -> Callable[..., Any]:
        async def awaited(request: Any, timeout: float | None = None) -> Any:
            try:
                return _valid(await call(request, timeout=default_timeout if timeout is None else timeout))
            except grpc.RpcError as error:
                raise domain_error(error, where) from error

        return awaited

    @staticmethod
    def _streaming(call: Callable[..., Any], where: str, _: float) -> Callable[..., Any]:
        async def streaming(request: Any, timeout: float | None = None) -> Any:
            replies = call(request, timeout=timeout)
            try:
                async for reply in replies:
                    yield _valid(reply)
            except grpc.RpcError as error:
                raise domain_error(error, where) from error
            finally:
                replies.cancel()

        return streaming

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no call {name!r} in this service")

    async def close(self) -> None:
        await self._channel.close()

"""The standard health service, asked with bytes as any gRPC probe sends them."""

from __future__ import annotations

import grpc
import pytest

from kvstore.rpc import Method, Server, Service
from kvstore.transfer.segment import Peer

ECHO = Service("test.Echo", {"echo": Method(Peer, Peer)})


class Echo:
    def echo(self, request: Peer) -> Peer:
        return request


@pytest.fixture
def check():
    server = Server([(ECHO, Echo())])
    channel = grpc.insecure_channel(server.address)
    yield channel.unary_unary("/grpc.health.v1.Health/Check")
    channel.close()
    server.close()


@pytest.mark.parametrize("service", ["", "test.Echo"])
def test_serving(check, service):
    request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    assert check(request, timeout=10) == b"\x08\x01"


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"\x0a\x05other", grpc.StatusCode.NOT_FOUND),
        (b"\x0a\x09test.Echo!", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x12\x01x", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a\x02\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_is_not_served_and_what_is_no_request(check, request_bytes, code):
    with pytest.raises(grpc.RpcError) as caught:
        check(request_bytes, timeout=10)
    assert caught.value.code() == code

"""The standard gRPC health service (`grpc.health.v1.Health/Check`), for probes of orchestrators.

Its two messages are one field each, written here by hand: no protobuf is needed.
"""

from __future__ import annotations

from collections.abc import Collection

import grpc

_SERVING = b"\x08\x01"  # HealthCheckResponse { status: SERVING }
_SERVICE_TAG = 0x0A  # HealthCheckRequest { string service = 1 }


def health_handler(services: Collection[str]) -> grpc.GenericRpcHandler:
    """Answers SERVING for the server itself ("") and for the services that it serves; others are NOT_FOUND."""
    known = {"", *services}

    def check(request: bytes, context: grpc.ServicerContext) -> bytes:
        service = _service_of(request)
        if service is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "malformed HealthCheckRequest")
        if service not in known:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {service!r} here, only {sorted(known)}")
        return _SERVING

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )


def _service_of(request: bytes) -> str | None:
    """The field `service`; None for bytes that are no such message (names end at 127 bytes)."""
    if not request:
        return ""
    if len(request) < 2 or request[0] != _SERVICE_TAG or request[1] != len(request) - 2 or request[1] > 127:
        return None
    try:
        return request[2:].decode()
    except UnicodeDecodeError:
        return None

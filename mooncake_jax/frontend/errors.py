"""OpenAI's error shape, and what a domain error means to an HTTP client."""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from kvstore.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidError,
    RefusedError,
    StoreError,
    UnavailableError,
)

_MAX_SAID = 1000  # characters of a message


class ApiError(Exception):
    """An answer that is not 200: `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, _cut(message), param and _cut(param), code
        self.retry_after_seconds = retry_after_seconds

    @property
    def kind(self) -> str:
        """The `type` field: whose fault it is."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, dict[str, str | None]]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> web.Response:
        headers = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_seconds)))
        return web.Response(
            body=msgspec.json.encode(self.body()),
            status=self.status,
            headers=headers,
            content_type="application/json",
        )


def _cut(text: str) -> str:
    """Names of a client's making may be megabytes."""
    return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}…"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client can repair it, and `message` says how."""
    return ApiError(400, message, param=param, code=code)


def from_domain(error: StoreError) -> ApiError:
    """429 where waiting helps, 503 where a role is missing, 400 where the request is at fault, else 500."""
    match error:
        case RefusedError():
            return ApiError(429, str(error), code="overloaded", retry_after_seconds=error.retry_after_seconds)
        case ExhaustedError():
            return ApiError(429, str(error), code="no_room", retry_after_seconds=1.0)
        case UnavailableError():
            return ApiError(503, str(error), code="unavailable", retry_after_seconds=1.0)
        case DeadlineError():
            return ApiError(504, str(error), code="deadline")
        case InvalidError():
            return invalid(str(error))
        case _:
            return ApiError(500, str(error), code="internal")

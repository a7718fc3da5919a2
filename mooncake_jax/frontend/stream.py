"""Server-sent events: headers go out with the first event, so an early failure is still an HTTP status."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from mooncake_jax.frontend.errors import ApiError

UNREAD_SECONDS = 60.0  # that a client may leave what was written unread, before it counts as gone
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """`data: …` events of one response, ended by `data: [DONE]`, or by an error event without it."""

    def __init__(self, request: web.Request):
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)

    @property
    def started(self) -> bool:
        return self._response.prepared

    async def send(self, *events: dict[str, Any] | msgspec.Raw) -> None:
        await self._write(b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events))

    async def done(self) -> web.StreamResponse:
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Say what happened and end the stream: never a silent end."""
        await self.send(error.body())
        self._response.force_close()
        await self._response.write_eof()
        return self._response

    async def _write(self, raw: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        try:
            async with asyncio.timeout(UNREAD_SECONDS):
                await self._response.write(raw)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"the client has read nothing for {UNREAD_SECONDS:g} s") from None

"""An aiohttp application served by an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from aiohttp import web

GRACE_SECONDS = 5.0


class HttpServer:
    """A started server; `port` is the bound one. `close` waits for running requests, then cancels."""

    def __init__(self, build: Callable[[], web.Application], *, host: str = "127.0.0.1", port: int = 0):
        """`build` is called in the loop. Raises OSError when the address is taken."""
        self.host, self.port = host, port
        self._build = build
        self._runner: web.AppRunner | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http")
        self._thread.start()
        self._closed = False
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._runner = web.AppRunner(
            self._build(),
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=GRACE_SECONDS,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

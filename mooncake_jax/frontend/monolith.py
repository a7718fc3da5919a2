"""A backend in this process: one engine, one request at a time, no store. The oracle, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvstore.errors import UnavailableError
from mooncake_jax.frontend.backend import Event, Started
from mooncake_jax.messages import ClusterInfo
from mooncake_jax.request import FinishReason, PromptLogprobs, Request, TokenEvent, TopToken

NAME = "monolith"
log = logging.getLogger(__name__)


class SoloAnswer(Protocol):
    """`finish` is None if the request was cancelled."""

    @property
    def finish(self) -> FinishReason | None: ...


class SoloEngine(Protocol):
    """`mooncake_jax.engine.oracle.Monolith` is one."""

    @property
    def max_tokens(self) -> int: ...

    def generate(
        self,
        request: Request,
        on_token: Callable[[int, float, Sequence[TopToken]], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        on_prompt: Callable[[PromptLogprobs], None] | None = None,
    ) -> SoloAnswer: ...


class MonolithBackend:
    """A `Backend`: `build` and every request run in one thread, the only one that touches the engine."""

    def __init__(self, build: Callable[[], SoloEngine]):
        """`build` loads and warms up; until it returns, the backend is not ready."""
        self._build = build
        self._engine: SoloEngine | None = None
        self._closing = threading.Event()

    @property
    def max_tokens(self) -> int | None:
        return self._engine.max_tokens if self._engine else None

    @property
    def cluster(self) -> ClusterInfo | None:
        return None

    async def start(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=NAME)
        self._building = asyncio.get_running_loop().run_in_executor(self._thread, self._get_ready)

    async def close(self) -> None:
        """Ends the request that runs, and waits for a build that does."""
        self._closing.set()
        await self._building
        self._thread.shutdown()

    async def generate(self, request: Request, avoid: Sequence[str] = ()) -> AsyncGenerator[Event, None]:
        """See `Backend`. There is nobody to avoid."""
        if self._engine is None:
            raise UnavailableError("the engine is not there yet")
        engine: SoloEngine = self._engine
        loop, events = asyncio.get_running_loop(), asyncio.Queue[PromptLogprobs | TokenEvent | None]()
        left = threading.Event()

        def tell(event: PromptLogprobs | TokenEvent | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def tell_token(token: int, logprob: float, top: Sequence[TopToken]) -> None:
            tell(TokenEvent([token], [logprob], None, [list(top)] if request.sampling.num_top else []))

        def run() -> None:
            try:
                if not cancelled():
                    answer = engine.generate(request, tell_token, cancelled, tell)
                    tell(TokenEvent([], [], answer.finish))
            finally:
                tell(None)

        def cancelled() -> bool:
            return left.is_set() or self._closing.is_set()

        work = loop.run_in_executor(self._thread, run)
        try:
            yield Started(NAME, NAME, 0, 0)
            while (event := await events.get()) is not None:
                yield event
            await work
        finally:
            left.set()
            await asyncio.shield(asyncio.gather(work, return_exceptions=True))

    def _get_ready(self) -> None:
        try:
            self._engine = self._build()
        except Exception:
            log.exception("the engine cannot be built: never ready")

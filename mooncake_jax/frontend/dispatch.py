"""The request path through a cluster: place → reserve → prefill → generate → end, each by RPC.

Whatever happens to a request, by the end of its `Attempt.close` the streams are left, the staging memory
is released and the bookings are over. Steps that take something at the other side are run to their end even
when the client has left, so that what they took is known and can be given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from kvstore.errors import (
    DeadlineError,
    ExhaustedError,
    InternalError,
    NotFoundError,
    StaleError,
    StoreError,
    UnavailableError,
)
from kvstore.rpc import AsyncStub, Empty
from mooncake_jax.frontend.backend import Event, Started
from mooncake_jax.messages import CONDUCTOR, DECODE, PREFILL, ClusterInfo, PlaceRequest, RequestEnd
from mooncake_jax.request import (
    DecodeRequest,
    FirstToken,
    Placement,
    PrefillDone,
    PrefillRequest,
    Request,
    ReserveRequest,
    StagingHandle,
    TokenEvent,
)

NUM_ATTEMPTS = 3
RESERVE_PATIENCE_SECONDS = 30.0  # how long a request waits for room at decode before 429
FIRST_TOKEN_SECONDS = 600.0
DRAIN_SECONDS = 60.0  # prefill's last stores after an answer of one token
SLOT_SECONDS = 600.0  # waiting for a place in the batch
STALL_SECONDS = 60.0  # between two events of one stream
CALL_SECONDS = 10.0
POLL_SECONDS = 0.5
STALE_SECONDS = 5.0  # a Conductor silent for longer is not ready
_RETRYABLE = (UnavailableError, StaleError, NotFoundError, InternalError, DeadlineError)
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Dispatcher:
    """A `Backend` over a Conductor and the instances it names; from `start` to `close` in one event loop.

    Of several Conductors one places all requests, until it does not answer or has no instance: then the next does.
    """

    def __init__(self, *conductor_addresses: str, reserve_patience_seconds: float = RESERVE_PATIENCE_SECONDS):
        if not conductor_addresses:
            raise ValueError("a dispatcher needs the address of a Conductor")
        self._conductor_addresses = conductor_addresses
        self.reserve_patience_seconds = reserve_patience_seconds
        self._stubs: dict[tuple[str, str], AsyncStub] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._open = 0  # attempts not yet closed
        self._info: ClusterInfo | None = None
        self._heard = float("-inf")
        self._poll_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the channels to the Conductors and begin to follow the cluster."""
        self._conductors: list[Any] = [
            AsyncStub(address, CONDUCTOR, timeout_seconds=CALL_SECONDS)
            for address in self._conductor_addresses
        ]
        self.conductor = self._conductors[0]
        self._poll_task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Wait until every request's resources are given back, then close the channels."""
        if self._poll_task is None:
            return
        self._poll_task.cancel()
        await asyncio.gather(self._poll_task, *self._closing, return_exceptions=True)
        await asyncio.gather(*(stub.close() for stub in (*self._conductors, *self._stubs.values())))
        self._poll_task = None

    @property
    def cluster(self) -> ClusterInfo | None:
        return self._info if time.monotonic() - self._heard < STALE_SECONDS else None

    @property
    def max_tokens(self) -> int | None:
        info = self.cluster
        return min((i.max_tokens for i in info.instances), default=None) if info and info.ready else None

    async def generate(self, request: Request, avoid: Sequence[str] = ()) -> AsyncGenerator[Event, None]:
        """See `Backend`. Tries another pair, or another Conductor, when one fails before the first token; afterwards
        the failure is the answer's. Raises RefusedError, UnavailableError and ExhaustedError for 'not now'."""
        avoided = list(avoid)
        for remaining in reversed(range(NUM_ATTEMPTS)):
            attempt = Attempt(self, request)
            self._open += 1
            emitted = again = False
            try:
                async with aclosing(attempt.events(avoided)) as events:
                    async for event in events:
                        emitted = True
                        yield event
                return
            except _RETRYABLE as error:
                again = remaining > 0 and not emitted and (attempt.at != "" or self._leave(attempt.conductor))
                if not again:
                    raise
                failed = attempt.at or "the Conductor"
                log.warning("%s: trying another one than %s: %s", request.request_id, failed, error)
                avoided += [attempt.at] if attempt.at else []
            finally:
                closing = asyncio.create_task(self._give_back(attempt))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
                if again:  # the booking ends before the next one under the same id begins
                    await asyncio.shield(closing)

    def stub(self, role: str, address: str) -> Any:
        """The one channel to `address`; `role` is "prefill" or "decode"."""
        key = (role, address)
        if key not in self._stubs:
            self._stubs[key] = AsyncStub(address, PREFILL if role == "prefill" else DECODE)
        return self._stubs[key]

    def _leave(self, conductor: object) -> bool:
        """Place at another Conductor from now on; False: there is none."""
        if len(self._conductors) == 1:
            return False
        if conductor is self.conductor:  # no other request has moved on meanwhile
            following = (self._conductors.index(conductor) + 1) % len(self._conductors)
            self.conductor = self._conductors[following]
        return True

    async def _give_back(self, attempt: Attempt) -> None:
        try:
            await attempt.close()
        finally:
            self._open -= 1

    async def _poll(self) -> None:
        while True:
            conductor = self.conductor
            try:
                info = await conductor.cluster(Empty(), timeout=2.0)
                self._info, self._heard = info, time.monotonic()
                if not info.ready:
                    self._leave(conductor)
                if not self._open:
                    await self._drop_stubs(info)
            except StoreError as error:
                log.info("no word from the Conductor: %s", error)
                self._leave(conductor)
            await asyncio.sleep(POLL_SECONDS)

    async def _drop_stubs(self, info: ClusterInfo) -> None:
        """Forget the addresses of instances that are gone. Only while no request is open: closing a channel
        would cancel its calls, and a Conductor that just restarted knows nobody yet."""
        alive = {(i.role, i.instance.address) for i in info.instances}
        for key in [key for key in self._stubs if key not in alive]:
            await self._stubs.pop(key).close()


class Attempt:
    """One try to serve a request on one pair of instances, and all it took on the way."""

    def __init__(self, dispatcher: Dispatcher, request: Request):
        self._dispatcher, self._request = dispatcher, request
        self.conductor = dispatcher.conductor  # has the booking
        self.at = ""  # the instance whose answer is awaited: the one to avoid should this fail
        self._begun = time.monotonic()
        self._place: asyncio.Task[Placement] | None = None
        self._reserve: asyncio.Task[StagingHandle] | None = None
        self._prefill: AsyncGenerator[FirstToken | PrefillDone, None] | None = None
        self._first: FirstToken | None = None
        self._prefill_done = False
        self._drain = False  # the answer is complete; prefill may still store its blocks
        self._booked = False
        self._handed_over = False  # decode has taken the staging memory: it says so by its first event

    async def events(self, avoid: Sequence[str]) -> AsyncGenerator[Event, None]:
        """The answer's events; call `close` afterwards, however this ended."""
        request, dispatcher = self._request, self._dispatcher
        self._place = asyncio.create_task(self.conductor.place(PlaceRequest(request, list(avoid))))
        placement = await asyncio.shield(self._place)
        handle = await self._reserved(placement) if request.max_tokens > 1 else None

        self.at = placement.prefill.name
        prefill = dispatcher.stub("prefill", placement.prefill.address)
        self._prefill = prefill.prefill(PrefillRequest(request, placement, handle))
        self._first = first = await _next(self._prefill, FirstToken, FIRST_TOKEN_SECONDS)
        yield Started(
            placement.prefill.name, placement.decode.name, first.cached_tokens, first.fetched_tokens
        )
        if first.prompt is not None:
            yield first.prompt
        ended = first.token in request.stop_token_ids
        tops = [first.top] if request.sampling.num_top else []
        if ended or handle is None:
            self._drain = True
            yield TokenEvent([first.token], [first.logprob], "stop" if ended else "length", tops)
            return
        yield TokenEvent([first.token], [first.logprob], None, tops)
        yield await self._prefilled()

        self.at = placement.decode.name
        decode = dispatcher.stub("decode", placement.decode.address)
        async with aclosing(decode.generate(DecodeRequest(request, handle, first.token))) as tokens:
            while True:
                patience = STALL_SECONDS if self._handed_over else SLOT_SECONDS
                event = await _next(tokens, TokenEvent, patience)
                self._handed_over = True
                yield event
                if event.finish:
                    return

    async def close(self) -> None:
        """Give everything back. Never raises: what a dead peer held ends with its lease."""
        try:
            placement = await self._placed()
            handle = await self._staged()
            if self._prefill is not None:
                await self._leave_prefill(self._prefill)
            if handle and placement and not self._handed_over:
                decode = self._dispatcher.stub("decode", placement.decode.address)
                await _ignoring_store_errors(decode.release(handle))
            if self._booked:
                seconds = time.monotonic() - self._begun
                phase = "decode" if self._prefill_done else "all"
                await self._end(RequestEnd(self._request.request_id, phase, self._prefill_done, seconds))
        except Exception:
            log.exception("%s: cleaning up", self._request.request_id)

    async def _reserved(self, placement: Placement) -> StagingHandle:
        """Staging memory at decode, waited for while it is full. Raises ExhaustedError after the patience."""
        self.at = placement.decode.name
        request, decode = self._request, self._dispatcher.stub("decode", placement.decode.address)
        wanted = ReserveRequest(
            request.request_id, placement.decode.epoch, len(request.tokens), request.max_tokens
        )
        deadline = time.monotonic() + self._dispatcher.reserve_patience_seconds
        pause = 0.02
        while True:
            self._reserve = asyncio.create_task(decode.reserve(wanted))
            try:
                return await asyncio.shield(self._reserve)
            except ExhaustedError:
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def _prefilled(self) -> PrefillDone:
        done = await _next(self._prefill, PrefillDone, STALL_SECONDS)
        await self._end_prefill(done)
        return done

    async def _leave_prefill(self, stream: AsyncGenerator[FirstToken | PrefillDone, None]) -> None:
        if self._drain:
            try:
                done = await _next(stream, PrefillDone, DRAIN_SECONDS)
                await self._end_prefill(done)
            except StoreError as error:
                log.info("%s: prefill did not finish storing: %s", self._request.request_id, error)
        await stream.aclose()

    async def _placed(self) -> Placement | None:
        """The placement, once its call has ended; notes whether the Conductor may hold a booking."""
        if self._place is None:
            return None
        try:
            placement = await self._place
        except StoreError as error:
            self._booked = isinstance(error, DeadlineError)
            return None
        self._booked = True
        return placement

    async def _staged(self) -> StagingHandle | None:
        """The reservation, once its call has ended."""
        if self._reserve is None:
            return None
        try:
            return await self._reserve
        except StoreError:
            return None

    async def _end_prefill(self, done: PrefillDone) -> None:
        self._prefill_done = True
        assert self._first is not None
        await self._end(
            RequestEnd(
                self._request.request_id,
                "prefill",
                True,
                done.prefill_seconds,
                done.queue_seconds,
                self._first.cached_tokens,
                self._first.fetched_tokens,
            )
        )

    async def _end(self, end: RequestEnd) -> None:
        await _ignoring_store_errors(self.conductor.end(end))


async def _next(stream: Any, kind: type[Result], seconds: float) -> Result:
    """The next event of a stream, a `kind`. Raises DeadlineError; InternalError for another or none."""
    try:
        async with asyncio.timeout(seconds):
            event = await anext(stream, None)
    except TimeoutError:
        raise DeadlineError(f"no {kind.__name__} within {seconds:g} s") from None
    if not isinstance(event, kind):
        raise InternalError(f"expected {kind.__name__}, got {type(event).__name__}")
    return event


async def _ignoring_store_errors(call: Awaitable[Any]) -> None:
    try:
        await call
    except StoreError as error:
        log.info("giving back: %s", error)

"""Where a replay sends its requests: any OpenAI endpoint, or the Conductor and the instances it names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from kvstore.errors import ExhaustedError, RefusedError, StoreError
from launch.replaying.outcome import Outcome
from launch.replaying.prompts import Line
from mooncake_jax.frontend.backend import Started
from mooncake_jax.frontend.dispatch import Dispatcher
from mooncake_jax.request import Request, TokenEvent

_REQUEST_SECONDS = 600.0
_REJECTED = 429
_DONE = b"[DONE]"


class Tokens:
    """When the tokens of one answer came. Clock seconds."""

    def __init__(self, sent: float):
        self._sent = sent
        self._first = self._last = -1.0
        self._num = 0
        self._longest_gap = -1.0

    def add(self, num: int, now: float) -> None:
        """`num` tokens came together."""
        if num < 1:
            return
        if self._num:
            self._longest_gap = max(self._longest_gap, now - self._last)
        else:
            self._first = now
        self._last, self._num = now, self._num + num

    def fill(self, outcome: Outcome, num_tokens: int = 0) -> Outcome:
        """`outcome` with these times; `num_tokens`: what the server says it generated."""
        num = max(num_tokens, self._num)
        return msgspec.structs.replace(
            outcome,
            output_tokens=num,
            ttft_seconds=self._first - self._sent if self._num else -1.0,
            mean_tbt_seconds=(self._last - self._first) / (num - 1) if num > 1 else -1.0,
            longest_gap_seconds=self._longest_gap,
        )


class Target(Protocol):
    """`send` never raises: what went wrong is in the outcome."""

    async def start(self) -> None: ...

    async def send(self, line: Line, outcome: Outcome) -> Outcome:
        """`outcome` completed: what came of `line`, sent now."""
        ...

    async def close(self) -> None: ...


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = -1


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class OpenAITarget:
    """`/v1/completions` with prompts of token ids, streamed."""

    def __init__(self, url: str, model: str):
        self._url, self._model = url.rstrip("/"), model
        self._decode = msgspec.json.Decoder(_Chunk).decode

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, line: Line, outcome: Outcome) -> Outcome:
        body = {
            "model": self._model,
            "prompt": line.tokens,
            "max_tokens": line.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens, num_tokens, is_done = Tokens(time.monotonic()), 0, False
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    return await _refused(response, outcome)
                async for raw in response.content:
                    data = raw.strip().removeprefix(b"data:").strip()
                    is_done = is_done or data == _DONE
                    if not raw.startswith(b"data:") or data == _DONE:
                        continue
                    if data.startswith(b'{"error"'):
                        return msgspec.structs.replace(outcome, status="failed", error=data.decode()[:300])
                    chunk = self._decode(data)
                    tokens.add(sum(1 for choice in chunk.choices if choice.text), time.monotonic())
                    if chunk.usage:
                        num_tokens = chunk.usage.completion_tokens
                        if details := chunk.usage.prompt_tokens_details:
                            outcome = msgspec.structs.replace(outcome, cached_tokens=details.cached_tokens)
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError) as error:
            return msgspec.structs.replace(outcome, status="failed", error=f"{type(error).__name__}: {error}")
        if not is_done:
            return msgspec.structs.replace(outcome, status="failed", error="the stream broke off")
        return tokens.fill(outcome, num_tokens)


class ConductorTarget:
    """Straight to a Conductor, or to the next of several: no HTTP and no text, and the server tells what was reused."""

    def __init__(self, *addresses: str, salt: str = ""):
        """Prompts of another `salt` share nothing with these."""
        self._dispatcher, self._salt = Dispatcher(*addresses), salt

    async def start(self) -> None:
        await self._dispatcher.start()

    async def close(self) -> None:
        await self._dispatcher.close()

    async def send(self, line: Line, outcome: Outcome) -> Outcome:
        request = Request(
            f"replay-{time.time_ns():x}-{line.index}", line.tokens, line.max_tokens, salt=self._salt
        )
        tokens = Tokens(time.monotonic())
        try:
            async with aclosing(self._dispatcher.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        outcome = msgspec.structs.replace(
                            outcome, cached_tokens=event.cached_tokens, prefill=event.prefill
                        )
                    elif isinstance(event, TokenEvent):
                        tokens.add(len(event.tokens), time.monotonic())
        except (RefusedError, ExhaustedError) as error:
            retry = error.retry_after_seconds if isinstance(error, RefusedError) else -1.0
            return msgspec.structs.replace(
                outcome, status="rejected", retry_after_seconds=retry, error=str(error)
            )
        except StoreError as error:
            return msgspec.structs.replace(outcome, status="failed", error=str(error))
        return tokens.fill(outcome)


async def _refused(response: aiohttp.ClientResponse, outcome: Outcome) -> Outcome:
    text = (await response.text())[:300]
    if response.status != _REJECTED:
        return msgspec.structs.replace(outcome, status="failed", error=f"{response.status}: {text}")
    try:
        retry = float(response.headers.get("Retry-After", "-1"))
    except ValueError:  # a date
        retry = -1.0
    return msgspec.structs.replace(outcome, status="rejected", retry_after_seconds=retry, error=text)


async def replay(target: Target, lines: list[Line], progress: Callable[[Outcome], None]) -> list[Outcome]:
    """Send every line at its time, whatever became of those before it (open loop)."""
    await target.start()
    start = time.monotonic()

    async def one(line: Line) -> Outcome:
        lag = max(time.monotonic() - start - line.at_seconds, 0.0)
        outcome = Outcome(line.index, line.at_seconds, lag, "ok", len(line.tokens))
        outcome = await target.send(line, outcome)
        progress(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    try:
        for line in lines:
            await asyncio.sleep(max(start + line.at_seconds - time.monotonic(), 0.0))
            tasks.append(asyncio.create_task(one(line)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await target.close()

"""Where the time of one request goes on a running cluster, one request at a time."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from mooncake_jax.frontend.backend import Started
from mooncake_jax.frontend.dispatch import Dispatcher
from mooncake_jax.request import PrefillDone, Request, TokenEvent


@dataclass(frozen=True)
class Parts:
    """Seconds. What TTFT holds beside queue and prefill is scheduling, staging memory and messages."""

    cached_tokens: int
    ttft: float
    queue: float
    prefill: float
    transfer_tail: float  # from the first token until decode has all KV: what computation did not hide
    decode: float  # from the first token to the last

    @property
    def scheduling(self) -> float:
        return max(self.ttft - self.queue - self.prefill, 0.0)


async def _answered(dispatcher: Dispatcher, request: Request) -> Parts:
    start = time.monotonic()
    first = last = start
    cached, done = 0, PrefillDone(0.0, 0.0, 0.0, 0)
    async with aclosing(dispatcher.generate(request)) as events:
        async for event in events:
            if isinstance(event, Started):
                cached = event.cached_tokens
            elif isinstance(event, PrefillDone):
                done = event
            elif isinstance(event, TokenEvent):
                last = time.monotonic()
                first = last if first == start else first
    return Parts(
        cached,
        first - start,
        done.queue_seconds,
        done.prefill_seconds,
        done.stream_tail_seconds,
        last - first,
    )


def answered_one_by_one(
    conductor: str, prompts: Sequence[list[int]], num_outputs: int, pause_seconds: float
) -> list[Parts]:
    """Each prompt when the one before is answered and `pause_seconds` have passed: its blocks are announced then.

    `num_outputs`: 2 or more. Raises StoreError.
    """

    async def run() -> list[Parts]:
        dispatcher = Dispatcher(conductor)
        await dispatcher.start()
        try:
            parts = []
            for index, tokens in enumerate(prompts):
                request = Request(f"parts-{time.time_ns():x}-{index}", tokens, num_outputs)
                parts.append(await _answered(dispatcher, request))
                await asyncio.sleep(pause_seconds)
            return parts
        finally:
            await dispatcher.close()

    return asyncio.run(run())


def median(parts: Sequence[Parts]) -> Parts:
    """Part by part."""

    def of(name: str) -> float:
        return statistics.median(getattr(one, name) for one in parts)

    return Parts(
        int(of("cached_tokens")),
        of("ttft"),
        of("queue"),
        of("prefill"),
        of("transfer_tail"),
        of("decode"),
    )

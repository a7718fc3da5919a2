"""The course of one answer: events of the backend in, deltas of text out, and what is known at its end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import InternalError
from mooncake_jax.frontend.backend import Backend, Started
from mooncake_jax.frontend.job import Job
from mooncake_jax.frontend.metrics import Metrics
from mooncake_jax.frontend.text import AnswerText, Delta, Tokenizer
from mooncake_jax.request import PrefillDone


@dataclass
class Answer:
    """Everything said so far."""

    job: Job
    started: Started | None = None
    ttft_seconds: float | None = None
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.pieces += delta.pieces
        self.logprobs += delta.logprobs
        self.finish = delta.finish

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`; `cached_tokens` is what prefill reused."""
        num_prompt, num_answer = len(self.job.request.tokens), len(self.tokens)
        cached = self.started.cached_tokens if self.started else 0
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def extensions(self) -> dict[str, Any]:
        """What we say beyond OpenAI's fields: the route, and the prompt's token ids if asked for."""
        extensions: dict[str, Any] = {"mooncake": self.route()}
        if self.job.return_token_ids:
            extensions["prompt_token_ids"] = self.job.request.tokens
        return extensions

    def route(self) -> dict[str, Any]:
        """The `mooncake` extension: where the answer ran, and what was reused."""
        started = self.started or Started("", "", 0, 0)
        return {
            "prefill": started.prefill,
            "decode": started.decode,
            "cached_tokens": started.cached_tokens,
            "fetched_tokens": started.fetched_tokens,
            "ttft_seconds": self.ttft_seconds,
        }


async def deltas(
    answer: Answer, backend: Backend, tokenizer: Tokenizer, metrics: Metrics
) -> AsyncGenerator[Delta, None]:
    """Runs `answer.job`, filling `answer`; ends with the delta that has a `finish`.

    A stop string ends the work at the backend, as does closing this generator. Raises `StoreError`s.
    """
    job, begun = answer.job, time.monotonic()
    text = AnswerText(tokenizer.detokenizer(), job.stops, job.request.stop_token_ids)
    last = begun
    async with aclosing(backend.generate(job.request, job.avoid)) as events:
        async for event in events:
            if isinstance(event, Started):
                answer.started = event
                metrics.count_prompt(len(job.request.tokens), event.cached_tokens, event.fetched_tokens)
                continue
            if isinstance(event, PrefillDone):
                metrics.queue.observe(event.queue_seconds)
                continue
            now = time.monotonic()
            if answer.ttft_seconds is None:
                answer.ttft_seconds = now - begun
                metrics.ttft.observe(answer.ttft_seconds)
            elif event.tokens:
                metrics.tbt.observe((now - last) / len(event.tokens))
            last = now
            delta = text.push(event)
            answer.add(delta)
            metrics.generated.inc(len(delta.tokens))
            yield delta
            if delta.finish:
                return
    raise InternalError(f"request {job.id}: the answer broke off without a finish reason")

"""The course of one answer: events of the backend in, deltas of text out, and what is known at its end."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import InternalError
from mooncake_jax.frontend.backend import Backend, Started
from mooncake_jax.frontend.job import Choice, Job, Prompt
from mooncake_jax.frontend.metrics import Metrics
from mooncake_jax.frontend.text import AnswerText, Delta, Tokenizer
from mooncake_jax.request import PrefillDone, PromptLogprobs, Request

MANY_TOKENS = 100  # at once: milliseconds of work, which a thread does beside the event loop


@dataclass
class Answer:
    """Everything said so far."""

    choice: Choice
    first: Answer | None = None  # to the same prompt, if this is not it
    started: Started | None = None
    scores: PromptLogprobs | None = None  # of the prompt
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # its first token came, or never will
    ttft_seconds: float | None = None
    num_generated: int = 0
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.pieces += delta.pieces
        self.logprobs += delta.logprobs
        self.tops += delta.tops
        self.finish = delta.finish

    def whole(self) -> Delta:
        """All deltas in one."""
        finish: Any = self.finish
        return Delta("".join(self.text), self.tokens, self.pieces, self.logprobs, finish, self.tops)

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


def answers_to(job: Job) -> list[Answer]:
    """One for each choice, with nothing said yet."""
    answers: list[Answer] = []
    first: Answer | None = None
    for choice in job.choices:
        first = None if choice.is_first else first
        answers.append(Answer(choice, first))
        first = first or answers[-1]
    return answers


def usage(job: Job, answers: list[Answer]) -> dict[str, Any]:
    """OpenAI's `usage`: every prompt counts once, and `cached_tokens` is what its first answer reused."""
    num_prompt = sum(len(prompt.tokens) for prompt in job.prompts)
    num_generated = sum(answer.num_generated for answer in answers)
    cached = sum(a.started.cached_tokens for a in answers if a.choice.is_first and a.started)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def extensions(job: Job, answer: Answer) -> dict[str, Any]:
    """What we say beyond OpenAI's fields: the route of an answer, and its prompt's token ids if asked for."""
    told: dict[str, Any] = {"mooncake": answer.route()}
    if job.return_token_ids:
        told["prompt_token_ids"] = answer.choice.prompt.tokens
    return told


async def deltas(
    job: Job, answer: Answer, backend: Backend, tokenizer: Tokenizer, metrics: Metrics
) -> AsyncGenerator[Delta, None]:
    """Runs `answer.choice`, filling `answer`; ends with the delta that has a `finish`.

    Further answers to a prompt wait for the first one's first token: then the prompt's blocks can be reused. A stop
    string ends the work at the backend, as does closing this generator. Raises `StoreError`s.
    """
    request = answer.choice.request
    try:
        if answer.first is not None:
            await answer.first.begun.wait()
            answer.scores = answer.first.scores
        if request is None:
            delta = await _echoed(job, answer, tokenizer, "length")
            answer.add(delta)
            yield delta
            return
        async with aclosing(_generated(job, answer, request, backend, tokenizer, metrics)) as parts:
            async for delta in parts:
                answer.add(delta)
                yield delta
    finally:
        answer.begun.set()


async def _generated(
    job: Job, answer: Answer, request: Request, backend: Backend, tokenizer: Tokenizer, metrics: Metrics
) -> AsyncGenerator[Delta, None]:
    begun = last = time.monotonic()
    detokenizer = tokenizer.detokenizer(continues=job.continues)
    text = AnswerText(detokenizer, job.stops, request.stop_token_ids, job.min_tokens)
    echoes = job.echo
    async with aclosing(backend.generate(request, job.avoid)) as events:
        async for event in events:
            if isinstance(event, Started):
                answer.started = event
                metrics.count_prompt(len(request.tokens), event.cached_tokens, event.fetched_tokens)
                continue
            if isinstance(event, PrefillDone):
                metrics.queue.observe(event.queue_seconds)
                continue
            if isinstance(event, PromptLogprobs):
                answer.scores = event
                continue
            now = time.monotonic()
            if answer.ttft_seconds is None:
                answer.ttft_seconds = now - begun
                metrics.ttft.observe(answer.ttft_seconds)
            elif event.tokens:
                metrics.tbt.observe((now - last) / len(event.tokens))
            last = now
            answer.begun.set()
            if echoes or not job.max_tokens:
                echoes = False
                yield await _echoed(job, answer, tokenizer, None if job.max_tokens else "length")
                if not job.max_tokens:
                    return
            delta = text.push(event)
            answer.num_generated += len(delta.tokens)
            metrics.generated.inc(len(delta.tokens))
            yield delta
            if delta.finish:
                return
    raise InternalError(f"request {request.request_id}: the answer broke off without a finish reason")


async def _echoed(job: Job, answer: Answer, tokenizer: Tokenizer, finish: Any) -> Delta:
    """The prompt as the beginning of the answer, if asked for: in a thread where it is long, so that others go on."""
    if not job.echo:
        return Delta("", [], [], [], finish)
    tell = functools.partial(_prompt_told, answer.choice.prompt, answer.scores, tokenizer, finish)
    if len(answer.choice.prompt.tokens) > MANY_TOKENS:
        return await asyncio.to_thread(tell)
    return tell()


def _prompt_told(prompt: Prompt, scores: PromptLogprobs | None, tokenizer: Tokenizer, finish: Any) -> Delta:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([token]) for token in prompt.tokens]
    pieces[-1] += detokenizer.flush()
    text = "".join(pieces) if prompt.text is None else prompt.text
    if scores is None:
        return Delta(text, prompt.tokens, pieces, [None] * len(pieces), finish)
    logprobs, tops = scores.unpacked()
    return Delta(
        text, prompt.tokens, pieces, [None, *logprobs], finish, [None, *tops] if scores.num_top else []
    )

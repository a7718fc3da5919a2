"""The HTTP application: routes, limits, and one request's way through validation, backend and writer."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvstore.errors import StoreError
from mooncake_jax.frontend import chat, completions, schema
from mooncake_jax.frontend.answer import MANY_TOKENS, Answer, answers_to, deltas, extensions
from mooncake_jax.frontend.backend import Backend
from mooncake_jax.frontend.body import read_json
from mooncake_jax.frontend.config import FrontendConfig
from mooncake_jax.frontend.encoding import encoded
from mooncake_jax.frontend.errors import ApiError, from_domain, invalid
from mooncake_jax.frontend.job import Job, Limits, Prompt, build_job, check_vocabulary
from mooncake_jax.frontend.merging import merge
from mooncake_jax.frontend.metrics import Metrics
from mooncake_jax.frontend.openapi import document
from mooncake_jax.frontend.stream import EventStream
from mooncake_jax.frontend.text import Delta, Tokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Writer = completions.CompletionWriter | chat.ChatWriter
Result = TypeVar("Result")
METRICS = web.AppKey("metrics", Metrics)
log = logging.getLogger(__name__)


def build_app(config: FrontendConfig, tokenizer: Tokenizer, backend: Backend) -> web.Application:
    """Serve it with `handler_cancellation=True`, so that a client that leaves cancels its handler, and with
    `auto_decompress=False` (see `body.read_json`)."""
    return Frontend(config, tokenizer, backend).app


class Frontend:
    """Handlers of one app. The backend starts and stops with it."""

    def __init__(self, config: FrontendConfig, tokenizer: Tokenizer, backend: Backend):
        self._config, self._tokenizer, self._backend = config, tokenizer, backend
        self._metrics = Metrics(lambda: backend.cluster)
        self._num_running = 0
        self._created = int(time.time())
        self.app = web.Application(client_max_size=config.max_body_nbytes, middlewares=[_errors])
        self.app[METRICS] = self._metrics
        self.app.cleanup_ctx.append(self._lifetime)
        self.app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/openapi.json", self.openapi),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
            ]
        )

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = schema.decode(await read_json(http, self._config.max_body_nbytes), schema.CompletionBody)
        self._check_model(body.model)
        prompts = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                tokens = await self._tokenized("prompt", self._tokenizer.encode, prompt)
                prompts.append(Prompt(tokens, prompt))
            else:
                prompts.append(Prompt(prompt))
        job = self._job(body, prompts, self._config.completion_max_tokens, completions.ID_PREFIX)
        return await self._answer(http, job, completions.CompletionWriter(job, self._tokenizer.token_bytes))

    async def chat(self, http: web.Request) -> web.StreamResponse:
        body = schema.decode(await read_json(http, self._config.max_body_nbytes), schema.ChatBody)
        self._check_model(body.model)
        messages = [message.plain() for message in body.messages]
        tokens = await self._tokenized("messages", self._tokenizer.chat, messages)
        job = self._job(body, [Prompt(tokens)], self._config.chat_max_tokens, chat.ID_PREFIX)
        return await self._answer(http, job, chat.ChatWriter(job, self._tokenizer.token_bytes))

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        """Text or a conversation to token ids, as the other endpoints see them."""
        body = schema.decode(await read_json(http, self._config.max_body_nbytes), schema.TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("send either prompt or messages", "prompt", "conflicting_fields")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise invalid(
                    "add_special_tokens is for a prompt: messages have those of the chat template",
                    "add_special_tokens",
                    "conflicting_fields",
                )
            messages = [message.plain() for message in body.messages]
            tokens = await self._tokenized("messages", self._tokenizer.chat, messages)
        else:
            # without special tokens only if told so: a model decides itself whether it has any
            add_bos = False if body.add_special_tokens is False else None
            encode = functools.partial(self._tokenizer.encode, add_bos=add_bos)
            tokens = await self._tokenized("prompt", encode, body.prompt)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._backend.max_tokens})

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        """Token ids to the text that they are by themselves."""
        body = schema.decode(await read_json(http, self._config.max_body_nbytes), schema.DetokenizeBody)
        self._check_model(body.model)
        check_vocabulary(body.tokens, self._config.vocab_size, "tokens")

        def decode(tokens: list[int]) -> str:
            detokenizer = self._tokenizer.detokenizer()
            return detokenizer.push(tokens) + detokenizer.flush()

        return _json({"prompt": await self._in_pool(decode, body.tokens)})

    async def openapi(self, _: web.Request) -> web.StreamResponse:
        return _json(document(self._config))

    async def models(self, _: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, http: web.Request) -> web.StreamResponse:
        self._check_model(http.match_info["model"])
        return _json(self._model())

    async def health(self, _: web.Request) -> web.StreamResponse:
        return _json({"status": "alive"})

    async def ready(self, _: web.Request) -> web.StreamResponse:
        self._limit()
        return _json({"status": "ready"})

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    def _check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for another model; None is whichever there is."""
        if name not in (None, self._config.model):
            raise ApiError(
                404,
                f"no model {name!r} here: this server has {self._config.model!r}",
                param="model",
                code="model_not_found",
            )

    def _model(self) -> dict[str, Any]:
        model = {
            "id": self._config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "mooncake_jax",
        }
        return model | {"max_model_len": self._backend.max_tokens}

    def _limit(self) -> int:
        limit = self._backend.max_tokens
        if limit is None:
            raise ApiError(
                503,
                "not ready: no instance serves this model yet",
                code="not_ready",
                retry_after_seconds=1.0,
            )
        return limit

    async def _tokenized(self, param: str, encode: Callable[[Any], list[int]], text: Any) -> list[int]:
        try:
            return await self._in_pool(encode, text)
        except ValueError as error:
            raise invalid(str(error), param, f"invalid_{param}") from None

    async def _in_pool(self, work: Callable[[Any], Result], argument: Any) -> Result:
        """Off the event loop: a long prompt takes a while."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, argument)

    def _job(
        self,
        body: schema.CompletionBody | schema.ChatBody,
        prompts: list[Prompt],
        default: int,
        id_prefix: str,
    ) -> Job:
        if not all(prompt.tokens for prompt in prompts):
            raise invalid("the prompt is empty: it has no tokens", "prompt")
        limits = Limits(self._limit(), default, self._config.vocab_size, self._tokenizer.eos_ids)
        job = build_job(body, prompts, limits, id_prefix=id_prefix, created=int(time.time()))
        if len(job.choices) > self._config.max_concurrent:
            raise invalid(
                f"{len(job.choices)} answers in one request: this server gives {self._config.max_concurrent} at once",
                "n",
                "conflicting_fields",
            )
        return job

    async def _answer(self, http: web.Request, job: Job, writer: Writer) -> web.StreamResponse:
        answers = answers_to(job)
        sources = [deltas(job, answer, self._backend, self._tokenizer, self._metrics) for answer in answers]
        with self._running(len(answers)):
            async with aclosing(merge(sources)) as parts:
                if job.stream:
                    return await self._streamed(http, job, answers, writer, parts)
                async for _ in parts:
                    pass
        num_tokens = sum(len(answer.tokens) for answer in answers)
        return _json(await _written(job, num_tokens, lambda: writer.whole(answers)))

    async def _streamed(
        self,
        http: web.Request,
        job: Job,
        answers: list[Answer],
        writer: Writer,
        parts: AsyncIterator[tuple[int, Delta]],
    ) -> web.StreamResponse:
        stream = EventStream(http)
        verbose = job.num_logprobs is not None or job.return_token_ids
        opened: set[int] = set()
        try:
            async for index, delta in parts:
                answer = answers[index]
                opening = [] if index in opened else writer.opening(answer)
                opened.add(index)
                if not (opening or delta.text or delta.finish or verbose):
                    continue
                told = extensions(job, answer) if delta.finish else {}
                chunk = await _written(
                    job,
                    len(delta.tokens),
                    lambda answer=answer, delta=delta, told=told: writer.chunk(answer, delta) | told,
                )
                await stream.send(*opening, chunk)
            if job.include_usage:
                await stream.send(writer.usage(answers))
            return await stream.done()
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not stream.started:
                raise
            return await stream.fail(_api_error(error))

    @contextmanager
    def _running(self, num_answers: int) -> Iterator[None]:
        """So many of the answers in flight. Raises ApiError (429) when there are too many."""
        if self._num_running + num_answers > self._config.max_concurrent:
            raise ApiError(
                429,
                f"{self._num_running} answers are being given already: {num_answers} more are too many",
                code="overloaded",
                retry_after_seconds=1.0,
            )
        self._num_running += num_answers
        self._metrics.in_flight.inc(num_answers)
        try:
            yield
        finally:
            self._num_running -= num_answers
            self._metrics.in_flight.dec(num_answers)

    async def _lifetime(self, _: web.Application) -> AsyncIterator[None]:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        await self._backend.start()
        yield
        await self._backend.close()
        self._pool.shutdown()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong leaves in OpenAI's error shape."""
    resource = request.match_info.route.resource
    endpoint = resource.canonical if resource else "other"
    try:
        response = await handler(request)
    except ConnectionError:
        log.info("%s: the client left", endpoint)
        raise
    except Exception as error:
        response = _api_error(error).response()
        if isinstance(error, web.HTTPException) and "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    request.app[METRICS].requests.labels(endpoint, str(response.status)).inc()
    return response


async def _written(
    job: Job, num_tokens: int, write: Callable[[], dict[str, Any]]
) -> dict[str, Any] | msgspec.Raw:
    """What `write` makes of so many tokens: in a thread if that takes long, so that other requests go on."""
    if job.num_logprobs is not None and num_tokens > MANY_TOKENS:
        return await asyncio.to_thread(lambda: msgspec.Raw(encoded(write())))
    return write()


def _json(body: dict[str, Any] | msgspec.Raw) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StoreError):
        return from_domain(error)
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, error.text or error.reason)
    log.exception("unexpected error in a handler", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal")

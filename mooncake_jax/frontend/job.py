"""From a decoded body to the records that the rest of the frontend works with: a `Job`, and its `Choice`s."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.draw import FORBIDDEN, MAX_BIASES
from mooncake_jax.frontend.errors import invalid
from mooncake_jax.frontend.schema import ChatBody, CompletionBody, Options
from mooncake_jax.request import Bias, Request, Sampling

MAX_SCORED = (
    400_000  # log probabilities that a request's echoes tell: answers times tokens times (most likely + 1)
)


@dataclass(frozen=True)
class Prompt:
    """What one or several answers continue. `text` is as the client wrote it, if it did."""

    tokens: list[int]
    text: str | None = None


@dataclass(frozen=True)
class Choice:
    """One answer to give: the `index`-th of its job."""

    index: int
    prompt: Prompt
    is_first: bool  # of its prompt: the others wait for its first token, and reuse its blocks
    request: Request | None  # None: nothing is to be computed


@dataclass(frozen=True)
class Job:
    """A validated HTTP request and how it is to be answered."""

    id: str
    model: str
    created: int  # seconds since 1970
    choices: tuple[Choice, ...]
    max_tokens: int  # of each answer; 0: only the prompt is wanted
    min_tokens: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    num_logprobs: int | None  # most likely tokens to tell beside each one; None: no log probabilities at all
    echo: bool
    continues: bool  # the answer goes on with the prompt's text; else it is a text of its own
    return_token_ids: bool
    avoid: tuple[str, ...]

    @property
    def prompts(self) -> list[Prompt]:
        return [choice.prompt for choice in self.choices if choice.is_first]

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What every body of the answer begins with; `kind` is its `object`. `usage` is null until it is known, where a
        stream was asked for it."""
        body: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return body | {"choices": choices} | ({"usage": None} if self.include_usage else {})


@dataclass(frozen=True)
class Limits:
    """What a job must fit."""

    max_tokens: int  # prompt and answer
    default_max_tokens: int  # of an answer that names none
    vocab_size: int
    eos_ids: tuple[int, ...]


def build_job(
    body: CompletionBody | ChatBody,
    prompts: Sequence[Prompt],
    limits: Limits,
    *,
    id_prefix: str,
    created: int,
) -> Job:
    """Raises ApiError (400) for what does not fit `limits` or each other.

    A seed is drawn where none is given; one of up to 64 bits is folded to 32. The i-th answer to a prompt uses
    seed + i.
    """
    echo, num_logprobs, wanted = False, None, body.max_tokens
    if isinstance(body, CompletionBody):
        echo, num_logprobs = bool(body.echo), body.logprobs
    else:
        wanted = wanted if body.max_completion_tokens is None else body.max_completion_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    lengths = [
        answer_length(len(prompt.tokens), wanted, limits.default_max_tokens, limits.max_tokens)
        for prompt in prompts
    ]
    min_tokens = body.min_tokens or 0
    if min_tokens > min(lengths):
        raise invalid(
            f"min_tokens={min_tokens}, but the answer may have {min(lengths)}",
            "min_tokens",
            "conflicting_fields",
        )
    for i, prompt in enumerate(prompts):
        check_vocabulary(prompt.tokens, limits.vocab_size, "prompt" if len(prompts) == 1 else f"prompt[{i}]")
    score = echo and num_logprobs is not None
    if score:
        _check_scored(prompts, body.num_choices, num_logprobs or 0, limits)
    job_id = f"{id_prefix}-{secrets.token_hex(12)}"
    seed = secrets.randbits(32) if body.seed is None else body.seed
    stop_ids = () if body.ignore_eos else limits.eos_ids
    biases = _biases(body, stop_ids, limits.vocab_size)
    choices = []
    for prompt, length in zip(prompts, lengths, strict=True):
        for i in range(body.num_choices):
            request = Request(
                request_id=f"{job_id}-{len(choices)}",
                tokens=prompt.tokens,
                max_tokens=max(length, 1),
                sampling=_sampling(body, (seed + i) % 2**32, biases, num_logprobs or 0),
                stop_token_ids=list(stop_ids),
                salt=body.cache_salt or "",
                score_prompt=score and i == 0,
            )
            needed = length > 0 or (score and i == 0)
            choices.append(Choice(len(choices), prompt, i == 0, request if needed else None))
    return Job(
        id=job_id,
        model=body.model,
        created=created,
        choices=tuple(choices),
        max_tokens=lengths[0],
        min_tokens=min_tokens,
        stops=tuple(body.stops),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        num_logprobs=num_logprobs,
        echo=echo,
        continues=isinstance(body, CompletionBody),
        return_token_ids=bool(body.return_token_ids),
        avoid=tuple(body.mooncake_avoid or ()),
    )


def _sampling(body: Options, seed: int, biases: list[Bias], num_top: int) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=seed,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        biases=biases,
        num_top=num_top,
    )


def _biases(body: Options, stop_ids: Sequence[int], vocab_size: int) -> list[Bias]:
    """The client's, and one that keeps end tokens away until `min_tokens` are drawn."""
    biases = []
    for key, amount in (body.logit_bias or {}).items():
        if int(key) >= vocab_size:
            message = f"logit_bias of token {key}: token ids are 0 to {vocab_size - 1}"
            raise invalid(message, "logit_bias", "unknown_token")
        biases.append(Bias(int(key), amount))
    if body.min_tokens:
        biases += [Bias(token, FORBIDDEN, body.min_tokens) for token in stop_ids]
    if len(biases) > MAX_BIASES:
        message = f"logit_bias and min_tokens change the logits of {len(biases)} tokens: at most {MAX_BIASES}"
        raise invalid(message, "logit_bias", "conflicting_fields")
    return biases


def _check_scored(prompts: Sequence[Prompt], num_answers: int, num_top: int, limits: Limits) -> None:
    echoed = num_answers * sum(len(prompt.tokens) for prompt in prompts)
    if echoed * (num_top + 1) > MAX_SCORED:
        raise invalid(
            f"{echoed} prompt tokens in all answers, with logprobs={num_top}: echo tells at most {MAX_SCORED} log"
            " probabilities; send fewer or shorter prompts, or a smaller n or logprobs",
            "logprobs",
            "conflicting_fields",
        )
    for prompt in prompts:
        num_tokens = len(prompt.tokens)
        if num_tokens >= limits.max_tokens:
            raise invalid(
                f"the context is {limits.max_tokens} tokens, and the prompt has {num_tokens}: to tell its log"
                " probabilities takes one more",
                "prompt",
                "context_length_exceeded",
            )


def check_vocabulary(tokens: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises ApiError (400) for a token id that the model does not have."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            param = name.partition("[")[0]
            raise invalid(
                f"{name}[{i}] is {token}: token ids are 0 to {vocab_size - 1}", param, "unknown_token"
            )


def answer_length(num_prompt: int, wanted: int | None, default: int, limit: int) -> int:
    """Tokens that the answer may have: `wanted`, else `default` or what is left of the context of `limit`.

    Raises ApiError (400) naming both lengths when prompt and answer do not fit; nothing is ever cut silently.
    """
    room = limit - num_prompt
    length = min(default, room) if wanted is None else wanted
    if room < min(length, 1) or length > room or (wanted is None and room < 1):
        raise invalid(
            f"the context is {limit} tokens, but the prompt has {num_prompt} and the answer may have"
            f" {max(length, 1)}: {num_prompt + max(length, 1)} in total; shorten one of them",
            "prompt" if room < 1 else "max_tokens",
            "context_length_exceeded",
        )
    return length

"""From a decoded body to the one record that the rest of the frontend works with."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_jax.frontend.errors import invalid
from mooncake_jax.frontend.schema import Options
from mooncake_jax.request import Request, Sampling


@dataclass(frozen=True)
class Job:
    """A validated request and how its answer is to be written."""

    request: Request
    model: str
    created: int  # seconds since 1970
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    avoid: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.request.request_id

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What every body of the answer begins with; `kind` is its `object`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def build_job(
    options: Options,
    tokens: list[int],
    *,
    id_prefix: str,
    created: int,
    max_tokens: int,
    stop_ids: Sequence[int],
    logprobs: bool,
) -> Job:
    """`max_tokens` is the answer's length, already checked against the context. A seed is drawn where none is
    given; one of up to 64 bits is folded to 32."""
    seed = secrets.randbits(32) if options.seed is None else options.seed % 2**32
    sampling = Sampling(
        temperature=1.0 if options.temperature is None else options.temperature,
        top_k=max(options.top_k or 0, 0),
        top_p=options.top_p or 1.0,
        seed=seed,
    )
    request = Request(
        request_id=f"{id_prefix}-{secrets.token_hex(12)}",
        tokens=tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=[] if options.ignore_eos else list(stop_ids),
        salt=options.cache_salt or "",
    )
    include_usage = bool(options.stream_options and options.stream_options.include_usage)
    return Job(
        request=request,
        model=options.model,
        created=created,
        stops=tuple(options.stops),
        stream=bool(options.stream),
        include_usage=include_usage,
        logprobs=logprobs,
        return_token_ids=bool(options.return_token_ids),
        avoid=tuple(options.mooncake_avoid or ()),
    )


def check_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ApiError (400) for a token id that the model does not have."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise invalid(f"prompt[{i}] is {token}: token ids are 0 to {vocab_size - 1}", "prompt")


def answer_length(num_prompt: int, wanted: int | None, default: int, limit: int) -> int:
    """Tokens that the answer may have: `wanted`, else `default` or what is left of the context of `limit`.

    Raises ApiError (400) naming both lengths when prompt and answer do not fit; nothing is ever cut silently.
    """
    room = limit - num_prompt
    length = min(default, room) if wanted is None else wanted
    if room < 1 or length > room:
        raise invalid(
            f"the context is {limit} tokens, but the prompt has {num_prompt} and the answer may have"
            f" {max(length, 1)}: {num_prompt + max(length, 1)} in total; shorten one of them",
            "prompt" if room < 1 else "max_tokens",
            "context_length_exceeded",
        )
    return length

"""The bodies of `/v1/completions` and `/v1/chat/completions`, typed; what is not understood is refused.

`null` means absent. Extensions beside OpenAI's fields: `top_k`, `ignore_eos`, `cache_salt` (the tenant's part
of every block key), `return_token_ids`, and, for tests and demos, `mooncake_avoid` (instances to avoid).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from mooncake_jax.frontend.errors import ApiError, invalid
from mooncake_jax.request import Name

_INT64 = Meta(ge=-(2**63), le=2**63 - 1)
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
# fields of OpenAI's that are accepted at the value that changes nothing
_NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "top_logprobs": 0,
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request share."""

    model: str
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, _INT64] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, _INT64] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    mooncake_avoid: Annotated[list[Name], Meta(max_length=64)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionBody(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prompt` is a string or token ids, or a list with exactly one of these."""

    prompt: str | list[Any]
    logprobs: Annotated[int, _INT64] | None = None
    best_of: Annotated[int, _INT64] | None = None
    echo: bool | None = None

    def single_prompt(self) -> str | list[int]:
        """The one prompt. Raises ApiError (400) for an empty, mixed or multiple one."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            if len(prompt) > 1:
                raise invalid(f"{len(prompt)} prompts in one request: send exactly one", "prompt")
            prompt = prompt[0]
        if not prompt:
            raise invalid("the prompt is empty: send text or at least one token id", "prompt")
        if isinstance(prompt, list):
            for i, token in enumerate(prompt):
                if type(token) is not int:
                    raise invalid(f"prompt[{i}] is {type(token).__name__}: expected a token id", "prompt")
        return prompt


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. `content` in parts is their texts, joined."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates expect it."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text}


class ChatBody(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_completion_tokens` is the newer name of `max_tokens`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _INT64] | None = None


Body = TypeVar("Body", CompletionBody, ChatBody)
_AT = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"field `(.*?)`")


def decode(raw: bytes, kind: type[Body]) -> Body:
    """The body of a request. Raises ApiError (400) that names the field at fault."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and value != neutral:
            raise invalid(f"{name}={value} is not supported: only {neutral}", name, "unsupported_value")
    if isinstance(body, CompletionBody) and body.logprobs not in (None, 0):
        raise invalid("logprobs: only 0 (the chosen token's) is supported", "logprobs", "unsupported_value")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    return body


def _named(message: str) -> ApiError:
    at, field = _AT.search(message), _FIELD.search(message)
    path = [part for part in (at and at.group(1), field and field.group(1)) if part]
    code = "unknown_field" if "unknown field" in message else "invalid_value"
    return invalid(message, ".".join(path) or None, code)

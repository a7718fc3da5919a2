"""The bodies of the POST endpoints, typed; what is not understood is refused by name.

`null` means absent. A field typed `None` is one of OpenAI's that we know and do not support: only `null` is
accepted. `docs/api.md` says of every field what it does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from models.draw import MAX_TOP
from mooncake_jax.frontend.errors import ApiError, invalid
from mooncake_jax.request import Name

MAX_CHOICES = 128  # of one request: prompts times `n`
MAX_STOPS = 16
MAX_LOGIT_BIASES = 300

_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_NoOrSomeTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
_NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_TokenKey = Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,9})$")]
_Text = Annotated[str, Meta(max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # only false: nothing is added to hide the lengths of chunks


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request share."""

    model: str
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: _Int64 | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    logit_bias: (
        Annotated[
            dict[_TokenKey, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIASES)
        ]
        | None
    ) = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: _NoOrSomeTokens | None = None
    n: _NumChoices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: _Text | None = None
    cache_salt: _Text | None = None
    return_token_ids: bool | None = None
    mooncake_avoid: Annotated[list[Name], Meta(max_length=64)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1


class CompletionBody(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prompt` is a string or token ids, or a list of these."""

    prompt: str | list[Any]
    max_tokens: _NoOrSomeTokens | None = None
    logprobs: _NumTop | None = None
    echo: bool | None = None
    best_of: _NumChoices | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """Every prompt. Raises ApiError (400) for an empty or mistyped one, or too many."""
        if isinstance(self.prompt, str):
            found: list[Any] = [self.prompt]
        elif self.prompt and isinstance(self.prompt[0], (str, list)):
            found = self.prompt
        else:
            found = [self.prompt]
        if len(found) * self.num_choices > MAX_CHOICES:
            raise invalid(
                f"{len(found)} prompts with n={self.num_choices} are {len(found) * self.num_choices} answers:"
                f" at most {MAX_CHOICES}",
                "prompt",
                "conflicting_fields",
            )
        for i, prompt in enumerate(found):
            _check_prompt(
                prompt, "prompt" if found[0] is self.prompt or prompt is self.prompt else f"prompt[{i}]"
            )
        return found


def _check_prompt(prompt: Any, name: str) -> None:
    if not isinstance(prompt, (str, list)):
        raise invalid(f"{name} is {type(prompt).__name__}: expected text or a list of token ids", "prompt")
    if not prompt:
        raise invalid(f"{name} is empty: send text or at least one token id", "prompt")
    if isinstance(prompt, list) and set(map(type, prompt)) != {int}:
        for i, token in enumerate(prompt):
            if type(token) is not int:
                raise invalid(f"{name}[{i}] is {type(token).__name__}: expected a token id", "prompt")


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. `content` in parts is their texts, joined."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1, max_length=10_000)]
    name: _Text | None = None
    annotations: None = (
        None  # these come back as null with an answer that a client puts into its next request
    )
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates expect it."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text}


_Messages = Annotated[list[Message], Meta(min_length=1, max_length=10_000)]


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]


class ChatBody(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_completion_tokens` is the newer name of `max_tokens`, and goes before it."""

    messages: _Messages
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: _NumTop | None = None
    response_format: TextFormat | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    modalities: None = None
    moderation: None = None
    parallel_tool_calls: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    service_tier: None = None
    store: None = None
    tool_choice: None = None
    tools: None = None
    verbosity: None = None
    web_search_options: None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=1 << 20)]


Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_AT = re.compile(r" - at `\$\.?(.*)`$")
_AT_KEY = re.compile(r" - at `key` in `\$\.?(.*)`$")
_FIELD = re.compile(r"field `(.*?)`", re.DOTALL)


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
    if isinstance(body, Options):
        _check_conflicts(body)
    return body


def _check_conflicts(body: CompletionBody | ChatBody | Options) -> None:
    """Fields that are right by themselves and not together."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options", "conflicting_fields")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise invalid(f"{name} is not supported here: leave it out", name, "unsupported_field")
    if isinstance(body, CompletionBody) and body.best_of not in (None, body.num_choices):
        raise invalid(
            f"best_of={body.best_of} with n={body.num_choices}: best_of may only equal n",
            "best_of",
            "conflicting_fields",
        )
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs", "conflicting_fields")


def _named(message: str) -> ApiError:
    key = _AT_KEY.search(message)
    if key:
        return invalid(message, key.group(1), "invalid_value")
    at, field = _AT.search(message), _FIELD.search(message)
    path = [part for part in (at and at.group(1), field and field.group(1)) if part]
    name = ".".join(path) or None
    if message.startswith("Expected `null`"):
        return invalid(f"{name} is not supported here: leave it out", name, "unsupported_field")
    return invalid(message, name, "unknown_field" if "unknown field" in message else "invalid_value")

"""The OpenAPI document of the HTTP API: request bodies from the typed records that validate them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from mooncake_jax.frontend import schema
from mooncake_jax.frontend.config import FrontendConfig

_BODIES = {
    "/v1/completions": (schema.CompletionBody, "Completion", "Continue a text"),
    "/v1/chat/completions": (schema.ChatBody, "ChatCompletion", "Answer a conversation"),
    "/tokenize": (schema.TokenizeBody, "Tokenized", "Text or a conversation to token ids"),
    "/detokenize": (schema.DetokenizeBody, "Detokenized", "Token ids to text"),
}
_GETS = {
    "/v1/models": ("ModelList", "The one model"),
    "/v1/models/{model}": ("Model", "The model, by its name"),
    "/health": ("Status", "The process is alive"),
    "/ready": ("Status", "Requests can be served"),
    "/openapi.json": ("Document", "This document"),
}
_POST_ERRORS = {
    "400": "What is wrong with the body, and where",
    "404": "Another model than the one served here",
    "413": "The body is too large",
    "415": "The body is not application/json",
}
_STREAMED_ERRORS = {
    "429": "Too much is being asked at the moment: again after Retry-After",
    "500": "A fault of ours",
    "503": "Nobody can serve it at the moment: again after Retry-After",
    "504": "An instance did not answer in time",
}


def document(config: FrontendConfig) -> dict[str, Any]:
    """OpenAPI 3.1, with the model's name and vocabulary filled in."""
    references, components = msgspec.json.schema_components(
        [body for body, _, _ in _BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    _say_what_types_do_not(components, config)
    paths: dict[str, Any] = {}
    for (path, (_, reply, summary)), reference in zip(_BODIES.items(), references, strict=True):
        generates = path.startswith("/v1/")
        errors = _POST_ERRORS | (_STREAMED_ERRORS if generates else {})
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": reply,
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": {"200": _reply(reply, streams=generates)} | _errors(errors),
            }
        }
    for path, (reply, summary) in _GETS.items():
        get: dict[str, Any] = {"summary": summary, "operationId": f"get{reply}{len(paths)}"}
        get["responses"] = {"200": _reply(reply)}
        if path == "/ready":
            get["responses"] |= _errors({"503": "Not yet, or not now"})
        if "{model}" in path:
            get["parameters"] = [
                {"name": "model", "in": "path", "required": True, "schema": {"const": config.model}}
            ]
            get["responses"] |= _errors({"404": "Another model"})
        paths[path] = {"get": get}
    paths["/metrics"] = {
        "get": {
            "summary": "Counters for Prometheus",
            "operationId": "getMetrics",
            "responses": {
                "200": {
                    "description": "Text format",
                    "content": {"text/plain": {"schema": {"type": "string"}}},
                }
            },
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mooncake_jax", "version": _version(), "description": "OpenAI-compatible API"},
        "paths": paths,
        "components": {"schemas": components | _REPLIES},
    }


def _say_what_types_do_not(components: dict[str, Any], config: FrontendConfig) -> None:
    """Rules that depend on the model, or that the records check themselves."""
    token = {"type": "integer", "minimum": 0, "maximum": config.vocab_size - 1}
    tokens = {"type": "array", "items": token, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    each = {
        "type": "array",
        "items": {"anyOf": [text, tokens]},
        "minItems": 1,
        "maxItems": schema.MAX_CHOICES,
    }
    components["CompletionBody"]["properties"]["prompt"] = {"anyOf": [text, tokens, each]}
    for name in ("CompletionBody", "ChatBody"):
        properties = components[name]["properties"]
        properties["model"] = {"const": config.model}
    for name in ("TokenizeBody", "DetokenizeBody"):
        components[name]["properties"]["model"] = {"enum": [config.model, None]}
    components["DetokenizeBody"]["properties"]["tokens"]["items"] = token
    components["TokenizeBody"]["oneOf"] = [
        {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}
        for one, other in (("prompt", "messages"), ("messages", "prompt"))
    ]
    components["TokenizeBody"]["oneOf"][1]["properties"]["add_special_tokens"] = {"type": "null"}


def _version() -> str:
    try:
        return version("mooncake-jax")
    except PackageNotFoundError:
        return "0"


def _reply(name: str, *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    if streams:
        content["text/event-stream"] = {"schema": _record(data=_STRING)}  # of one event: a chunk, or [DONE]
    return {"description": "Done", "content": content}


def _errors(statuses: dict[str, str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": error} for status, text in statuses.items()}


def _record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(one: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [one, {"type": "null"}]}


_STRING, _COUNT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}
_LOGPROB = {"type": "number", "maximum": 1e-3}  # rounding may lift a certain token above 0
_FINISH = {"enum": ["stop", "length"]}
_USAGE = _record(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_record(cached_tokens=_COUNT),
)
_ROUTE = _record(
    prefill=_STRING,
    decode=_STRING,
    cached_tokens=_COUNT,
    fetched_tokens=_COUNT,
    ttft_seconds=_or_null(_NUMBER),
)
_TOP = _record(token=_STRING, logprob=_LOGPROB, bytes=_list(_COUNT))
_TOKEN = _record(token=_STRING, logprob=_LOGPROB, bytes=_list(_COUNT), top_logprobs=_list(_TOP))


def _envelope(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return _record(
        id=_STRING,
        object={"const": kind},
        created=_COUNT,
        model=_STRING,
        choices=_list(choice),
        usage=_USAGE,
        mooncake=_ROUTE,
    )


_REPLIES = {
    "Completion": _envelope(
        "text_completion",
        _record(
            index=_COUNT,
            text=_STRING,
            finish_reason=_FINISH,
            logprobs=_or_null(
                _record(
                    tokens=_list(_STRING),
                    token_logprobs=_list(_or_null(_LOGPROB)),
                    top_logprobs=_or_null(
                        _list(_or_null({"type": "object", "additionalProperties": _LOGPROB}))
                    ),
                    text_offset=_list(_COUNT),
                )
            ),
        ),
    ),
    "ChatCompletion": _envelope(
        "chat.completion",
        _record(
            index=_COUNT,
            message=_record(role={"const": "assistant"}, content=_STRING),
            finish_reason=_FINISH,
            logprobs=_or_null(_record(content=_list(_TOKEN))),
        ),
    ),
    "Tokenized": _record(tokens=_list(_COUNT), count=_COUNT, max_model_len=_or_null(_COUNT)),
    "Detokenized": _record(prompt=_STRING),
    "Model": _record(id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING),
    "ModelList": _record(object={"const": "list"}, data=_list({"$ref": "#/components/schemas/Model"})),
    "Status": _record(status=_STRING),
    "Document": _record(openapi=_STRING, paths={"type": "object"}),
    "Error": _record(
        error=_record(
            message=_STRING,
            type=_STRING,
            param=_or_null(_STRING),
            code=_or_null(_STRING),
        )
    ),
}

"""A model's chat template: Jinja from a file we did not write, so rendered in a sandbox and within limits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = 16 * 1024 * 1024
MAX_RENDER_SECONDS = 5.0


class ChatTemplateError(ValueError):
    """No template, a broken one, or messages that it refuses."""


class ChatTemplate:
    """A compiled template; rendering it is thread-safe.

    Templates see `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception` and the
    `tojson` filter. There is no clock (`strftime_now`): a prompt that changes with the date would never meet
    its cached prefix again; templates that look for it fall back to a fixed date. The time limit is checked
    whenever the template writes something.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = ""):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(
                f"chat template of {len(source)} characters; at most {MAX_TEMPLATE_CHARS}"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt's text; raises ChatTemplateError with the template's own message where it refuses."""
        pieces: list[str] = []
        size, deadline = 0, time.monotonic() + MAX_RENDER_SECONDS
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(
                        f"the chat template wrote more than {MAX_RENDERED_CHARS} characters"
                    )
                if time.monotonic() > deadline:
                    raise ChatTemplateError(f"the chat template ran longer than {MAX_RENDER_SECONDS} seconds")
        except ChatTemplateError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise ChatTemplateError("the chat template ran out of its limits") from error
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)

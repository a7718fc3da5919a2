"""What one frontend process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FrontendConfig:
    """Limits and defaults of the HTTP API. `model` is the only name that requests may ask for."""

    model: str
    vocab_size: int
    max_concurrent: int = 256  # answers in flight; more are refused with 429
    max_body_nbytes: int = 8 << 20
    completion_max_tokens: int = 16  # when a completion names no max_tokens, as OpenAI's
    chat_max_tokens: int = 1024  # when a chat names none: what is left of the context, at most this

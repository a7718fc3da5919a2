"""What the HTTP layer asks of whatever generates: a cluster (`dispatch`) or one process (`monolith`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from mooncake_jax.messages import ClusterInfo
from mooncake_jax.request import PrefillDone, PromptLogprobs, Request, TokenEvent


class Started(msgspec.Struct, frozen=True):
    """First event of an answer: where it runs, and what was reused of its prompt."""

    prefill: str
    decode: str
    cached_tokens: int
    fetched_tokens: int


Event = Started | PromptLogprobs | PrefillDone | TokenEvent


class Backend(Protocol):
    """Generates token events for tokenised requests."""

    @property
    def max_tokens(self) -> int | None:
        """Longest prompt + answer that can be served now; None before anything can."""
        ...

    @property
    def cluster(self) -> ClusterInfo | None:
        """The last word of the Conductor, if there is one."""
        ...

    def generate(self, request: Request, avoid: Sequence[str] = ()) -> AsyncGenerator[Event, None]:
        """One `Started`; a `PromptLogprobs` if the request asks for it; then `TokenEvent`s, the last one with
        `finish`; a `PrefillDone` may come between.

        Closing the generator, or cancelling the task inside it, ends the work everywhere and frees what it
        held. Raises `StoreError`s. `avoid` names instances that the placement should leave out.
        """
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

"""One answer being generated, and what it holds on a decode instance."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from kvstore.block import root_key
from kvstore.errors import StoreError
from mooncake_jax.decode.answers import AnswerKeys
from mooncake_jax.decode.batch import Drawn
from mooncake_jax.decode.staging import StagedKV
from mooncake_jax.request import DecodeRequest, TokenEvent


class DecodeJob:
    """Made and closed by the request's handler; the engine's worker inserts its KV and draws its tokens."""

    def __init__(
        self,
        request: DecodeRequest,
        kv: StagedKV,
        fingerprint: bytes,
        block_tokens: int,
        on_inserted: Callable[[StagedKV], None],
        on_cancel: Callable[[], None],
    ):
        """`on_inserted` is called, from the worker, when the staged KV is in the device cache."""
        self.request, self.first_token = request.request, request.first_token
        self.kv = kv
        self.keys = AnswerKeys(root_key(fingerprint, self.request.salt), self.request.tokens, block_tokens)
        self.slot: int | None = None
        self.num_inserted = 0  # blocks
        self.cancelled = False
        self._on_inserted, self._on_cancel = on_inserted, on_cancel
        self._events: queue.SimpleQueue[Drawn | StoreError | None] = queue.SimpleQueue()

    @property
    def is_inserted(self) -> bool:
        return self.num_inserted == len(self.kv.blocks)

    def blocks_inserted(self, count: int) -> None:
        """`count` more blocks are in the device cache; after the last one the staging memory is free."""
        self.num_inserted += count
        if self.is_inserted:
            self._on_inserted(self.kv)

    def insert_again(self) -> None:
        """The device cache lost what was inserted; the staging memory still has it."""
        self.num_inserted = 0

    def draw(self, drawn: Drawn) -> None:
        """The worker drew a token."""
        self._events.put(drawn)

    def fail(self, error: StoreError) -> None:
        """The worker gave up."""
        self._events.put(error)

    def cancel(self) -> None:
        """From any thread: the worker lets go of it before its next step, and `events` ends."""
        self.cancelled = True
        self._events.put(None)
        self._on_cancel()

    def events(self) -> Iterator[TokenEvent]:
        """Tokens as they are drawn; those that waited for a slow caller come in one event.

        Raises what it failed of.
        """
        while True:
            tokens, logprobs, tops, finish = [], [], [], None
            waiting = [self._events.get()]
            while not self._events.empty():
                waiting.append(self._events.get())
            for event in waiting:
                if event is None:
                    return
                if isinstance(event, StoreError):
                    raise event
                tokens.append(event.token)
                logprobs.append(event.logprob)
                tops.append(event.top)
                finish = event.finish
            yield TokenEvent(tokens, logprobs, finish, tops if self.request.sampling.num_top else [])
            if finish is not None:
                return

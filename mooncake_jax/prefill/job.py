"""One request on its way through a prefill instance, and everything it holds there."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvstore.block import BlockFormat
from kvstore.client import Client
from kvstore.errors import StoreError
from kvstore.node import Node
from kvstore.transfer.engine import TransferEngine
from mooncake_jax.engine.contract import GroupKV, PromptScores, Sampled
from mooncake_jax.engine.prompt_logprobs import prompt_logprobs
from mooncake_jax.prefill.discipline import Candidate, next_tile
from mooncake_jax.prefill.fetch_times import FetchTimes
from mooncake_jax.prefill.home_copy import HomeCopy
from mooncake_jax.prefill.lease import StagingLease
from mooncake_jax.prefill.prefix import Prefix
from mooncake_jax.prefill.streaming import KVStream
from mooncake_jax.request import FirstToken, PrefillDone, PrefillRequest
from mooncake_jax.staging_layout import StagingLayout


class KVPaths(NamedTuple):
    """What KV moves through on a prefill instance."""

    format: BlockFormat
    home: Node
    client: Client
    transfer: TransferEngine
    fetch_times: FetchTimes


class PrefillJob:
    """Made and closed by the request's handler; the engine's worker begins it and computes its tiles.

    `events` carries FirstToken, or the error that ended it, or None when it was cancelled.
    """

    def __init__(self, request: PrefillRequest, paths: KVPaths, on_progress: Callable[[], None]):
        self.request = request.request
        self.tokens = np.array(request.request.tokens, np.int32)
        self.events: queue.SimpleQueue[FirstToken | StoreError | None] = queue.SimpleQueue()
        self.slot: int | None = None
        self.position = 0  # tokens in the cache
        self._opened = 0  # tokens cached, or in tiles that the engine was given
        self.cancelled = False
        self._paths, self._on_progress = paths, on_progress
        self._keys = request.placement.keys
        self._stream: KVStream | None = None
        self._loads_prefix = False
        self._scores: list[PromptScores] = []
        self._arrived = time.monotonic()
        self._staging = StagingLease(request.staging, self._arrived) if request.staging else None
        self._first_token = self._tile_began = self._arrived
        self._served_seconds = self._lost_seconds = (
            0.0  # of the tiles that are done, and of those that were for nothing
        )
        self._prefill_seconds = 0.0  # until the first token, known with it
        num_tokens = len(self.tokens)
        self._prefix = Prefix(
            paths.home,
            paths.client,
            paths.format,
            request.placement,
            1 if self.request.score_prompt else num_tokens,  # all of a prompt that is scored is computed
            on_progress,
            paths.fetch_times,
        )

    @property
    def remaining_tokens(self) -> int:
        """Tokens not cached and not yet computed; a forecast until it has begun."""
        if self.slot is not None:
            return len(self.tokens) - self.position
        return len(self.tokens) - self._prefix.expected_blocks * self._paths.format.block_tokens

    @property
    def pending_nbytes(self) -> int:
        """KV computed or reused, and not yet delivered."""
        return self._stream.pending_nbytes if self._stream is not None else 0

    @property
    def is_ready(self) -> bool:
        """The prefix is there, or will be by the time a layer group needs it."""
        return self._prefix.is_ready

    @property
    def is_open_to_its_end(self) -> bool:
        """The engine was given all that is left of it."""
        return self.slot is not None and self._opened == len(self.tokens)

    def candidate(self, now_seconds: float) -> Candidate:
        waited = now_seconds - self._arrived - self._served_seconds
        return Candidate(waited, self.remaining_tokens, self.slot is not None)

    def begin(self, slot: int) -> None:
        """Takes an engine slot, fixes the reused prefix and opens the stream."""
        self.slot = slot
        self._open_stream(again=False)

    def begin_again(self) -> None:
        """Back to before the first tile: fetched blocks, or what the slot held, are lost."""
        if self._stream is not None:
            self._stream.close()
        self._open_stream(again=True)

    @property
    def load(self) -> Callable[[int], list[np.ndarray]] | None:
        """For `PrefillEngine.prefill` of the next tile: given on the first one of a request with a reused prefix."""
        is_first = self._opened == self._prefix.num_blocks * self._paths.format.block_tokens
        return self._prefix.load if self._loads_prefix and is_first else None

    def open_tile(self, tile_tokens: int) -> tuple[int, int]:
        """`[start, stop)` of the next tile of at most so many tokens, which the engine is given now."""
        start, self._opened = next_tile(self._opened, len(self.tokens), tile_tokens)
        return start, self._opened

    def tile_begins(self) -> None:
        """The engine computes for it from now on."""
        self._tile_began = time.monotonic()

    def add_new(self, kv: GroupKV, num_tokens: int) -> None:
        """New KV of a tile of `num_tokens` tokens.

        Raises what broke the stream, so that no more is computed.
        """
        assert self._stream is not None
        if self._stream.failure is not None:
            raise self._stream.failure
        self._stream.add_new(kv, num_tokens)

    def add_scores(self, scores: PromptScores) -> None:
        """Of the prompt tokens that follow those of the tile."""
        self._scores.append(scores)

    def tile_done(self, num_tokens: int) -> float:
        """`num_tokens` more are in the cache; returns the seconds they took.

        After the first tile, reused blocks go to decode as well: not earlier, because copying them would delay the
        first token of a prompt that is cached but for its end.
        """
        assert self._stream is not None
        seconds = time.monotonic() - self._tile_began
        self._served_seconds += seconds
        self.position += num_tokens
        if self._loads_prefix:
            home, stop = self._prefix.num_home_blocks, self._prefix.num_blocks
            self._stream.add_prefix(0, *self._prefix.whole_blocks(0, home))
            self._stream.add_prefix(home, *self._prefix.whole_blocks(home, stop))
            self._loads_prefix = False
        return seconds

    def first_token(self, sampled: Sampled) -> FirstToken:
        """The answer's first token, with how much of the prompt was reused."""
        self._first_token = time.monotonic()
        own_seconds = self._served_seconds - self._lost_seconds
        self._prefill_seconds = own_seconds + self._first_token - self._tile_began
        z, request = self._paths.format.block_tokens, self.request
        return FirstToken(
            token=sampled.token,
            logprob=sampled.logprob,
            cached_tokens=self._prefix.num_blocks * z,
            fetched_tokens=self._prefix.num_fetched * z,
            top=list(sampled.top),
            prompt=prompt_logprobs(self._scores, request.sampling.num_top) if request.score_prompt else None,
        )

    def finish(self) -> PrefillDone:
        """Returns when all KV has arrived. Raises UnavailableError or InternalError when it cannot."""
        assert self._stream is not None
        self._stream.finish()
        return PrefillDone(
            queue_seconds=self._first_token - self._arrived - self._prefill_seconds,
            prefill_seconds=self._prefill_seconds,
            stream_tail_seconds=time.monotonic() - self._first_token,
            streamed_nbytes=self._stream.streamed_nbytes,
        )

    def cancel(self) -> None:
        """From any thread: the work stops at the next tile edge, and whoever waits on `events` wakes."""
        self.cancelled = True
        self._prefix.stop()
        if self._stream is not None:
            self._stream.stop()
        self.events.put(None)
        self._on_progress()

    def close(self) -> None:
        """Frees leases, reservations and the stream; no write is in flight after it.

        The worker must have let go.
        """
        if self._stream is not None:
            self._stream.close()
        self._prefix.close()

    def _open_stream(self, *, again: bool) -> None:
        f, home = self._paths.format, self._paths.home
        cached = self._prefix.begin()
        self._scores = []
        self._lost_seconds = self._served_seconds  # of tiles before, whose KV is not there any more
        self.position = self._opened = cached * f.block_tokens
        self._loads_prefix = cached > 0
        home_copy = HomeCopy(home, f, self._keys[cached:], cached)
        try:
            self._stream = KVStream(
                self._paths.transfer,
                StagingLayout(f, f.num_blocks(len(self.tokens))),
                staging=self._staging,
                home=home_copy,
                on_progress=self._on_progress,
                again=again,
            )
        except BaseException:
            home_copy.close()
            raise

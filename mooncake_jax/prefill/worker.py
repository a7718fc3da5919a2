"""The one thread that owns a prefill engine: it computes tile after tile, of whichever request is next.

Tiles are opened and finished in the same order. A new one is opened when none is open, or when the engine asks for more
(`PrefillEngine.feed_from`): an engine with a pipeline keeps it full over tiles of one request and of several.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from kvstore.errors import ExhaustedError, InternalError, InvalidError, StoreError, UnavailableError
from mooncake_jax.engine.contract import (
    EngineLostError,
    PrefillEngine,
    PromptScores,
    Sampled,
    TileItems,
)
from mooncake_jax.prefill.config import PrefillConfig
from mooncake_jax.prefill.discipline import choose
from mooncake_jax.prefill.fetch import PrefixLostError
from mooncake_jax.prefill.job import PrefillJob
from mooncake_jax.request import FirstToken
from mooncake_jax.speed import Speed

log = logging.getLogger(__name__)


_RETRY_SECONDS = 0.1  # between attempts to get back an engine that was lost


@dataclass(eq=False)
class _OpenTile:
    """Tokens that the engine was given, and whose items are not all taken."""

    job: PrefillJob
    num_tokens: int
    items: TileItems


class PrefillWorker:
    """Jobs come by `submit`, leave by their end, an error of their own, or `PrefillJob.cancel`."""

    def __init__(self, engine: PrefillEngine, config: PrefillConfig):
        self._engine, self._config = engine, config
        self._changed = threading.Condition()
        self._jobs: list[PrefillJob] = []
        self._open: deque[_OpenTile] = deque()
        self._free_slots = list(range(engine.num_slots))
        self._speed = Speed()
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._closed = False
        engine.feed_from(self._feed)
        self._thread = threading.Thread(target=self._run, name="prefill-engine")
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and self._failure is None and not self._closed

    def wait_ready(self, timeout_seconds: float) -> None:
        """Returns when the engine is warm. Raises UnavailableError when it failed to or takes longer."""
        if not self._ready.wait(timeout_seconds):
            raise UnavailableError(f"the prefill engine is not ready after {timeout_seconds} s")
        if self._failure is not None:
            raise UnavailableError(f"the prefill engine failed to start: {self._failure}") from self._failure

    def submit(self, job: PrefillJob) -> None:
        """Queues a job.

        Raises ExhaustedError when the queue is full, UnavailableError when not ready or closing.
        """
        with self._changed:
            if not self.is_ready:
                raise UnavailableError("this prefill instance is not ready")
            if len(self._jobs) >= self._config.max_queue:
                raise ExhaustedError(
                    f"{len(self._jobs)} requests are queued here, the limit is {self._config.max_queue}"
                )
            self._jobs.append(job)
            self._changed.notify_all()

    def wake(self) -> None:
        """Something that a job waited for may have come."""
        with self._changed:
            self._changed.notify_all()

    def let_go(self, job: PrefillJob) -> None:
        """Returns when the worker is through with a cancelled job: at the latest after this tile."""
        with self._changed:
            self._changed.wait_for(lambda: job not in self._jobs)

    def jobs(self) -> list[PrefillJob]:
        """Jobs queued or computing."""
        with self._changed:
            return list(self._jobs)

    @property
    def num_used_slots(self) -> int:
        return self._engine.num_slots - len(self._free_slots)

    @property
    def tokens_per_second(self) -> float:
        return self._speed.tokens_per_second

    def close(self) -> None:
        """Ends after the tile under way; jobs left over get UnavailableError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._warm_up()
                try:
                    while (tile := self._next_tile()) is not None:
                        self._finish_tile(tile)
                except EngineLostError as error:
                    self._lose_all(error)
        finally:
            self._closed = True
            for job in self.jobs():
                self._end(job, UnavailableError("this prefill instance is shutting down"))

    def _warm_up(self) -> None:
        """Returns when the engine is ready, or failed for good, or this closes."""
        said = ""
        while not self._closed:
            try:
                self._engine.warm_up()
            except EngineLostError as error:
                if str(error) != said:
                    log.warning("the prefill engine cannot be had: %s", error)
                said = str(error)
                with self._changed:
                    self._changed.wait(_RETRY_SECONDS)
                continue
            except Exception as error:
                log.exception("the prefill engine failed to warm up")
                self._failure = error
            self._ready.set()
            return

    def _next_tile(self) -> _OpenTile | None:
        """The oldest open tile, or one that is opened now: waits for a request. None: this closes."""
        while True:
            with self._changed:
                for job in [job for job in self._jobs if job.cancelled]:
                    self._end(job, None)
                if self._closed:
                    return None
                if self._open:
                    return self._open[0]
                job = self._pick()
                if job is None:
                    self._changed.wait()
                    continue
            self._open_tile(job)

    def _feed(self) -> None:
        """The engine has room beside the open tiles."""
        with self._changed:
            job = None if self._closed else self._pick()
        if job is not None:
            self._open_tile(job)

    def _pick(self) -> PrefillJob | None:
        """Whose tile is next."""
        jobs = self._eligible()
        picked = choose(
            [job.candidate(time.monotonic()) for job in jobs],
            tokens_per_second=self._speed.tokens_per_second,
            free_slots=len(self._free_slots),
            aging=self._config.aging,
        )
        return None if picked is None else jobs[picked]

    def _eligible(self) -> list[PrefillJob]:
        """Jobs whose prefix is there and whose KV does not pile up on its way out."""
        may_begin = sum(job.pending_nbytes for job in self._jobs) <= self._config.max_nbytes_in_flight
        return [
            job
            for job in self._jobs
            if job.is_ready
            and not job.cancelled
            and not job.is_open_to_its_end
            and (job.slot is not None or may_begin)
            and job.pending_nbytes <= self._config.max_request_nbytes_in_flight
        ]

    def _open_tile(self, job: PrefillJob) -> None:
        try:
            if job.slot is None:
                with self._changed:
                    slot = heapq.heappop(self._free_slots)
                job.begin(slot)
            assert job.slot is not None
            load = job.load
            start, stop = job.open_tile(self._engine.tile_tokens)
            targets = job.tokens[start + 1 : stop + 1] if job.request.score_prompt else job.tokens[:0]
            items = self._engine.prefill(
                job.slot,
                job.tokens[start:stop],
                start,
                load=load,
                sample=job.request.sampling if stop == len(job.tokens) else None,
                prompt=job.tokens,
                targets=targets if targets.size else None,
            )
        except Exception as error:
            self._failed(job, error)
        else:
            self._open.append(_OpenTile(job, stop - start, items))

    def _finish_tile(self, tile: _OpenTile) -> None:
        try:
            first_token = self._take_items(tile)
        except Exception as error:
            if tile in self._open or isinstance(error, EngineLostError):
                self._failed(tile.job, error)
            return
        if tile in self._open:
            self._open.remove(tile)
        if first_token is not None:
            self._end(tile.job, first_token)

    def _take_items(self, tile: _OpenTile) -> FirstToken | None:
        job, first_token = tile.job, None
        job.tile_begins()  # where the engine has a pipeline: the tile before has just ended
        with contextlib.closing(tile.items) as items:
            for item in items:
                if isinstance(item, Sampled):
                    first_token = job.first_token(item)
                elif isinstance(item, PromptScores):
                    job.add_scores(item)
                else:
                    job.add_new(item, tile.num_tokens)
        if tile not in self._open:
            return None  # its request ended when its next tile was refused
        self._speed.add(tile.num_tokens, job.tile_done(tile.num_tokens))
        return first_token

    def _failed(self, job: PrefillJob, error: Exception) -> None:
        """What a tile's failure means for its request, and for others. Raises EngineLostError, which is everybody's."""
        if isinstance(error, EngineLostError):
            raise error
        if isinstance(error, PrefixLostError):
            self._begin_again(job, str(error))
        elif isinstance(error, StoreError):
            self._end(job, error)
        elif isinstance(error, ValueError):  # the engine refused it before anything ran
            self._end(job, InvalidError(f"prefill engine: {error}"))
        else:
            log.error("request %s failed in the prefill engine", job.request.request_id, exc_info=error)
            self._end(job, InternalError(f"prefill engine: {type(error).__name__}: {error}"))
            for other in [other for other in self.jobs() if other.slot is not None]:  # all may be lost
                self._begin_again(other, "another request broke the engine's step")

    def _lose_all(self, error: EngineLostError) -> None:
        """Every request ends; new ones are refused until the engine is back."""
        log.warning("the prefill engine is lost: %s", error)
        with self._changed:
            self._ready.clear()
            for job in self.jobs():
                self._end(job, UnavailableError(f"this prefill instance lost its engine: {error}"))

    def _begin_again(self, job: PrefillJob, why: str) -> None:
        if job.cancelled:
            return
        log.warning("request %s starts again: %s", job.request.request_id, why)
        self._close_tiles(job)
        try:
            job.begin_again()
        except StoreError as error:
            self._end(job, error)
        except Exception as error:
            log.exception("request %s cannot begin again", job.request.request_id)
            self._end(job, InternalError(f"prefill: {type(error).__name__}: {error}"))

    def _end(self, job: PrefillJob, event: FirstToken | StoreError | None) -> None:
        self._close_tiles(job)
        with self._changed:
            self._jobs.remove(job)
            if job.slot is not None:
                heapq.heappush(self._free_slots, job.slot)
            self._changed.notify_all()
        job.events.put(event)

    def _close_tiles(self, job: PrefillJob) -> None:
        """Gives up what it has open."""
        for tile in [tile for tile in self._open if tile.job is job]:
            tile.items.close()
            self._open.remove(tile)

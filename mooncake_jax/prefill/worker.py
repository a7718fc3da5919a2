"""The one thread that owns a prefill engine: it computes tile after tile, of whichever request is next."""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
import time

from kvstore.errors import ExhaustedError, InternalError, InvalidError, StoreError, UnavailableError
from mooncake_jax.engine.contract import PrefillEngine, PromptScores, Sampled
from mooncake_jax.prefill.config import PrefillConfig
from mooncake_jax.prefill.discipline import choose, next_tile
from mooncake_jax.prefill.fetch import PrefixLostError
from mooncake_jax.prefill.job import PrefillJob
from mooncake_jax.request import FirstToken
from mooncake_jax.speed import Speed

log = logging.getLogger(__name__)


class PrefillWorker:
    """Jobs come by `submit`, leave by their end, an error of their own, or `PrefillJob.cancel`."""

    def __init__(self, engine: PrefillEngine, config: PrefillConfig):
        self._engine, self._config = engine, config
        self._changed = threading.Condition()
        self._jobs: list[PrefillJob] = []
        self._free_slots = list(range(engine.num_slots))
        self._speed = Speed()
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._closed = False
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
            self._engine.warm_up()
        except Exception as error:
            log.exception("the prefill engine failed to warm up")
            self._failure = error
        self._ready.set()
        try:
            while (job := self._next_job()) is not None:
                self._run_tile(job)
        finally:
            self._closed = True
            for job in self.jobs():
                self._end(job, UnavailableError("this prefill instance is shutting down"))

    def _next_job(self) -> PrefillJob | None:
        with self._changed:
            while not self._closed:
                for job in [job for job in self._jobs if job.cancelled]:
                    self._end(job, None)
                jobs = self._eligible()
                picked = choose(
                    [job.candidate(time.monotonic()) for job in jobs],
                    tokens_per_second=self._speed.tokens_per_second,
                    free_slots=len(self._free_slots),
                    aging=self._config.aging,
                )
                if picked is not None:
                    return jobs[picked]
                self._changed.wait()
        return None

    def _eligible(self) -> list[PrefillJob]:
        """Jobs whose prefix is there and whose KV does not pile up on its way out."""
        may_begin = sum(job.pending_nbytes for job in self._jobs) <= self._config.max_nbytes_in_flight
        return [
            job
            for job in self._jobs
            if job.is_ready
            and (job.slot is not None or may_begin)
            and job.pending_nbytes <= self._config.max_request_nbytes_in_flight
        ]

    def _run_tile(self, job: PrefillJob) -> None:
        try:
            if job.slot is None:
                with self._changed:
                    slot = heapq.heappop(self._free_slots)
                job.begin(slot)
            first_token = self._compute_tile(job)
        except PrefixLostError as error:
            self._begin_again(job, str(error))
        except StoreError as error:
            self._end(job, error)
        except ValueError as error:  # the engine refused it before anything ran
            self._end(job, InvalidError(f"prefill engine: {error}"))
        except Exception as error:
            log.exception("request %s failed in the prefill engine", job.request.request_id)
            self._end(job, InternalError(f"prefill engine: {type(error).__name__}: {error}"))
            for other in [other for other in self.jobs() if other.slot is not None]:  # all may be lost
                self._begin_again(other, "another request broke the engine's step")
        else:
            if first_token is not None:
                self._end(job, first_token)

    def _compute_tile(self, job: PrefillJob) -> FirstToken | None:
        assert job.slot is not None
        start, stop = next_tile(job.position, len(job.tokens), self._engine.tile_tokens)
        sample = job.request.sampling if stop == len(job.tokens) else None
        targets = job.tokens[start + 1 : stop + 1] if job.request.score_prompt else job.tokens[:0]
        first_token = None
        job.tile_begins()
        items = self._engine.prefill(
            job.slot,
            job.tokens[start:stop],
            start,
            load=job.load,
            sample=sample,
            prompt=job.tokens,
            targets=targets if targets.size else None,
        )
        with contextlib.closing(items):
            for item in items:
                if isinstance(item, Sampled):
                    first_token = job.first_token(item)
                elif isinstance(item, PromptScores):
                    job.add_scores(item)
                else:
                    job.add_new(item, stop - start)
        self._speed.add(stop - start, job.tile_done(stop - start))
        return first_token

    def _begin_again(self, job: PrefillJob, why: str) -> None:
        if job.cancelled:
            return
        log.warning("request %s starts again: %s", job.request.request_id, why)
        try:
            job.begin_again()
        except StoreError as error:
            self._end(job, error)
        except Exception as error:
            log.exception("request %s cannot begin again", job.request.request_id)
            self._end(job, InternalError(f"prefill: {type(error).__name__}: {error}"))

    def _end(self, job: PrefillJob, event: FirstToken | StoreError | None) -> None:
        with self._changed:
            self._jobs.remove(job)
            if job.slot is not None:
                heapq.heappush(self._free_slots, job.slot)
            self._changed.notify_all()
        job.events.put(event)

"""The one thread that owns a decode engine: it inserts a piece of new KV, then steps the batch, in turns."""

from __future__ import annotations

import logging
import threading
import time

from kvstore.errors import InternalError, StoreError, UnavailableError
from mooncake_jax.decode.answers import AnswerSaver
from mooncake_jax.decode.batch import Batch, Drawn
from mooncake_jax.decode.job import DecodeJob
from mooncake_jax.engine.contract import DecodeEngine
from mooncake_jax.speed import Speed

log = logging.getLogger(__name__)


class DecodeWorker:
    """Jobs come by `submit`, leave by their end, an error, or `DecodeJob.cancel`."""

    def __init__(self, engine: DecodeEngine, saver: AnswerSaver):
        self._engine, self._saver = engine, saver
        self._batch = Batch(engine.num_slots, engine.max_tokens, engine.format.block_tokens)
        self._changed = threading.Condition()
        self._waiting: list[DecodeJob] = []  # in order; those with a slot are being inserted
        self._active: dict[int, DecodeJob] = {}  # by slot
        self._speed = Speed()
        self._num_damaged = 0
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="decode-engine")
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and self._failure is None and not self._closed

    def wait_ready(self, timeout_seconds: float) -> None:
        """Returns when the engine is warm. Raises UnavailableError when it failed to or takes longer."""
        if not self._ready.wait(timeout_seconds):
            raise UnavailableError(f"the decode engine is not ready after {timeout_seconds} s")
        if self._failure is not None:
            raise UnavailableError(f"the decode engine failed to start: {self._failure}") from self._failure

    def submit(self, job: DecodeJob) -> None:
        """Queues a job whose KV has arrived. Raises UnavailableError when not ready or closing."""
        with self._changed:
            if not self.is_ready:
                raise UnavailableError("this decode instance is not ready")
            self._waiting.append(job)
            self._changed.notify_all()

    def wake(self) -> None:
        """A job was cancelled."""
        with self._changed:
            self._changed.notify_all()

    def let_go(self, job: DecodeJob) -> None:
        """Returns when the worker is through with an ended or cancelled job: at the latest after this step."""
        with self._changed:
            self._changed.wait_for(lambda: job not in self._waiting and job not in self._active.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_used_slots(self) -> int:
        return self._batch.num_taken

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV the rows of the batch hold."""
        with self._changed:
            return self._batch.num_cached_tokens

    @property
    def tokens_per_second(self) -> float:
        return self._speed.tokens_per_second

    @property
    def num_damaged(self) -> int:
        """Prompts whose KV changed while it was inserted, since the start."""
        return self._num_damaged

    def close(self) -> None:
        """Ends after the step under way; jobs left over get UnavailableError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._engine.warm_up()
        except Exception as error:
            log.exception("the decode engine failed to warm up")
            self._failure = error
        self._ready.set()
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._insert_piece()
                self._step()
        finally:
            with self._changed:
                self._closed = True
                left = [*self._waiting, *self._active.values()]
            for job in left:
                self._end(job, UnavailableError("this decode instance is shutting down"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._active)
            return not self._closed

    def _drop_cancelled(self) -> None:
        with self._changed:
            for job in [job for job in (*self._waiting, *self._active.values()) if job.cancelled]:
                self._end(job, None)

    def _insert_piece(self) -> None:
        with self._changed:
            job = self._waiting[0] if self._waiting else None
            if job is None:
                return
            if job.slot is None:
                job.slot = self._batch.take_slot()
            if job.slot is None:
                return
        try:
            piece = job.kv.blocks[job.num_inserted : job.num_inserted + self._engine.insert_blocks]
            self._engine.insert(job.slot, job.num_inserted, piece)
            # A prefill whose lease is over may have written here since the KV was found whole.
            job.kv.verify(job.num_inserted, len(piece))
        except StoreError as error:
            self._num_damaged += 1
            self._end(job, error)
            return
        except Exception as error:
            log.exception("request %s failed in the decode engine", job.request.request_id)
            self._end(job, InternalError(f"decode engine: {type(error).__name__}: {error}"))
            return
        job.blocks_inserted(len(piece))
        if job.is_inserted:
            self._join(job)

    def _join(self, job: DecodeJob) -> None:
        """Its KV is in the device cache: it takes part from the next step on."""
        assert job.slot is not None
        try:
            if job.request.sampling.looks_back:
                self._engine.remember(job.slot, job.request.tokens, [job.first_token])
        except Exception as error:
            log.exception("request %s failed in the decode engine", job.request.request_id)
            self._end(job, InternalError(f"decode engine: {type(error).__name__}: {error}"))
        else:
            with self._changed:
                self._waiting.remove(job)
                self._active[job.slot] = job
                self._batch.join(job.slot, job.request, job.first_token)

    def _step(self) -> None:
        if not self._active:
            return
        rows, began = self._batch.rows(), time.monotonic()
        fed = {slot: int(rows.tokens[slot]) for slot in self._active}
        try:
            step = self._engine.generate(rows)
        except Exception as error:
            log.exception("a decode step of %d requests failed", len(self._active))
            for job in list(self._active.values()):
                self._end(job, InternalError(f"decode engine: {type(error).__name__}: {error}"))
            for job in self._waiting:
                job.insert_again()
            return
        with self._changed:
            all_drawn = self._batch.advance(step)
        for drawn in all_drawn:
            self._save_full_block(self._active[drawn.slot], fed[drawn.slot], drawn)
        for drawn in all_drawn:
            self._deliver(self._active[drawn.slot], drawn)
        self._speed.add(len(all_drawn), time.monotonic() - began)

    def _save_full_block(self, job: DecodeJob, fed_token: int, drawn: Drawn) -> None:
        key, block = job.keys.feed(fed_token), drawn.full_block
        if key is None or block is None:
            return
        try:
            self._saver.save(key, lambda: self._engine.extract(drawn.slot, block))
        except Exception:
            log.exception("block %d of request %s was not kept", block, job.request.request_id)

    def _deliver(self, job: DecodeJob, drawn: Drawn) -> None:
        if drawn.finish is not None:
            with self._changed:
                del self._active[drawn.slot]
                self._changed.notify_all()
        job.draw(drawn)

    def _end(self, job: DecodeJob, error: StoreError | None) -> None:
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            else:
                del self._active[self._slot_of(job)]
            if job.slot is not None:
                self._batch.leave(job.slot)
            self._changed.notify_all()
        if error is not None:
            job.fail(error)

    @staticmethod
    def _slot_of(job: DecodeJob) -> int:
        if job.slot is None:
            raise ValueError(f"request {job.request.request_id} has no slot")
        return job.slot

"""The Decode service: lends staging memory, checks what arrived there, streams the next tokens.

The life of a request here:
1. `reserve` lends staging memory for the whole prompt's KV, by a handle that is good once.
2. Prefill writes into it, one-sidedly, while this instance generates for others.
3. `generate` waits for the flag of every (block, layer group), compares the bytes with their crc32, queues.
4. The worker inserts the blocks between two steps of the batch; then the staging memory is free and the
   request joins.
5. Blocks that the answer fills go to the home node. Its end or the caller leaving the stream frees the row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from kvstore.errors import (
    DeadlineError,
    ExhaustedError,
    InternalError,
    InvalidError,
    StaleError,
    UnavailableError,
)
from kvstore.node import Node
from kvstore.rpc import Empty
from kvstore.transfer import TransferEngine
from mooncake_jax.decode.answers import AnswerSaver
from mooncake_jax.decode.batch import finish_of
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.decode.job import DecodeJob
from mooncake_jax.decode.staging import StagedKV, Staging
from mooncake_jax.decode.worker import DecodeWorker
from mooncake_jax.engine.contract import DecodeEngine
from mooncake_jax.engine.limits import check_length, check_tokens
from mooncake_jax.messages import InstanceLoad, RoleStatus
from mooncake_jax.request import DecodeRequest, ReserveRequest, StagingHandle, TokenEvent

_POLL_SECONDS = 0.002  # flags are written one-sidedly: nobody tells
_SETTLE_SECONDS = 0.02


class DecodeService:
    """Handler of the DECODE table."""

    def __init__(
        self,
        name: str,
        epoch: int,
        engine: DecodeEngine,
        worker: DecodeWorker,
        staging: Staging,
        saver: AnswerSaver,
        *,
        home: Node,
        transfer: TransferEngine,
        config: DecodeConfig,
    ):
        self._name, self._epoch = name, epoch
        self._engine, self._worker = engine, worker
        self._staging, self._saver = staging, saver
        self._home, self._transfer, self._config = home, transfer, config
        self._lock = threading.Lock()
        self._request_ids: list[str] = []
        self._num_damaged = 0

    def reserve(self, request: ReserveRequest) -> StagingHandle:
        """Raises StaleError (another epoch), InvalidError (can never fit), ExhaustedError (not now)."""
        if request.epoch != self._epoch:
            raise StaleError(
                f"meant for epoch {request.epoch:x} of decode instance {self._name!r}, which is now epoch"
                f" {self._epoch:x}: ask for a new placement"
            )
        if not self._worker.is_ready:
            raise UnavailableError("this decode instance is not ready")
        check_length(self._engine, request.prompt_tokens, request.max_tokens)
        books = self._staging.books(time.monotonic())
        num_open = int(books["staging_reserved"]) + len(self._request_ids)
        limit = self._engine.num_slots + self._config.max_waiting
        if num_open >= limit:
            raise ExhaustedError(
                f"{num_open} requests are reserved or running here, the limit is {limit}: try again"
            )
        return self._staging.reserve(request.request_id, request.prompt_tokens, time.monotonic())

    def release(self, handle: StagingHandle) -> Empty:
        """Raises NotFoundError or StaleError for a handle that is not good (any more)."""
        self._staging.release(handle, time.monotonic())
        return Empty()

    def generate(self, request: DecodeRequest, context: grpc.ServicerContext) -> Iterator[TokenEvent]:
        """Raises InvalidError for a request that does not fit its handle, NotFoundError or StaleError for a bad
        handle, DeadlineError when KV is missing, InternalError when it arrived damaged or the engine failed."""
        prompt = request.request
        check_length(self._engine, len(prompt.tokens), prompt.max_tokens)
        check_tokens(self._engine, [request.first_token])
        with self._taken(request) as kv:
            needed = self._engine.format.num_blocks(len(prompt.tokens))
            if len(kv.blocks) != needed:
                raise InvalidError(
                    f"the handle is for {len(kv.blocks)} blocks,"
                    f" a prompt of {len(prompt.tokens)} tokens has {needed}"
                )
            finish = finish_of(request.first_token, 1, len(prompt.tokens), prompt, self._engine.max_tokens)
            if finish is not None:
                yield TokenEvent([], [], finish)
                return
            with self._job(request, kv) as job:
                if not context.add_callback(job.cancel):
                    return
                self._check_arrived(job)
                if not job.cancelled:
                    self._worker.submit(job)
                    yield from job.events()

    def status(self, request: Empty) -> RoleStatus:
        return RoleStatus(self._worker.is_ready, self.books())

    def books(self) -> dict[str, float]:
        """What requests hold here: all zero when idle."""
        home = self._home.stats()
        return {
            **self._staging.books(time.monotonic()),
            "open_requests": len(self._request_ids),
            "waiting_requests": self._worker.num_waiting,
            "used_slots": self._worker.num_used_slots,
            "saving_blocks": self._saver.num_pending,
            "home_leases": home["leases"],
            "home_reserved": home["reserved"],
        }

    def beats(self) -> Callable[[], InstanceLoad]:
        """`load`, for the heartbeats to one Conductor."""
        return self.load

    def load(self) -> InstanceLoad:
        """What this instance has to do, and its counters."""
        transfer = self._transfer.counters()
        num_damaged = self._num_damaged + self._worker.num_damaged
        failed_transfers = transfer.pop("failed") + self._staging.num_refused + num_damaged
        with self._lock:
            request_ids = list(self._request_ids)
        return InstanceLoad(
            name=self._name,
            epoch=self._epoch,
            request_ids=request_ids,
            queued_tokens=0,
            used_slots=self._worker.num_used_slots,
            kv_tokens=self._worker.num_cached_tokens,
            tokens_per_second=self._worker.tokens_per_second,
            counters={
                **{name: float(value) for name, value in transfer.items()},
                "failed_transfers": float(failed_transfers),
                "compiles_after_ready": float(self._engine.compiles_after_ready),
                "home_evicted": float(self._home.stats()["evicted"]),
                "answer_blocks_dropped": float(self._saver.num_dropped),
            },
        )

    @contextmanager
    def _taken(self, request: DecodeRequest) -> Iterator[StagedKV]:
        request_id = request.request.request_id
        kv = self._staging.take(request.handle, request_id, time.monotonic())
        with self._lock:
            self._request_ids.append(request_id)
        try:
            yield kv
        finally:
            self._end(kv)
            with self._lock:
                self._request_ids.remove(request_id)

    @contextmanager
    def _job(self, request: DecodeRequest, kv: StagedKV) -> Iterator[DecodeJob]:
        """A job that holds no slot any more when the block ends."""
        engine = self._engine
        z = engine.format.block_tokens
        job = DecodeJob(
            request, kv, engine.fingerprint, z, on_inserted=self._end, on_cancel=self._worker.wake
        )
        try:
            yield job
        finally:
            job.cancel()
            self._worker.let_go(job)

    def _end(self, kv: StagedKV) -> None:
        self._staging.end(kv, time.monotonic())

    def _check_arrived(self, job: DecodeJob) -> None:
        deadline = time.monotonic() + self._config.arrival_seconds
        while not job.kv.is_complete:
            if job.cancelled:
                return
            if time.monotonic() > deadline:
                self._count_damaged()
                total = job.kv.flags.shape[0] * job.kv.flags.shape[1]
                raise DeadlineError(
                    f"only {job.kv.num_arrived} of {total} layer groups of the prompt's blocks arrived within"
                    f" {self._config.arrival_seconds} s"
                )
            time.sleep(_POLL_SECONDS)
        try:
            job.kv.verify()
        except InternalError:
            time.sleep(_SETTLE_SECONDS)  # a flag's two words may arrive one after the other
            try:
                job.kv.verify()
            except InternalError:
                self._count_damaged()
                raise

    def _count_damaged(self) -> None:
        with self._lock:
            self._num_damaged += 1

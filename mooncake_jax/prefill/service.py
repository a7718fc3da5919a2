"""The Prefill service: validates, hands the request to the worker, streams FirstToken and PrefillDone.

The life of a request here:
1. The keys of its full blocks are derived again and compared; leading blocks are leased, others fetched
   meanwhile.
2. The worker computes it tile by tile, sharing the engine with others; new KV leaves behind each layer group.
3. FirstToken is sent as soon as it is sampled, PrefillDone when all KV has arrived at decode.
4. Its end, its failure or the caller leaving the stream frees the engine slot, leases, reservations and the
   stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import msgspec

from kvstore.block import chain_keys, root_key
from kvstore.errors import InvalidError, StaleError, StoreError
from kvstore.rpc import Empty
from mooncake_jax.engine.contract import PrefillEngine
from mooncake_jax.engine.limits import check_length, check_tokens
from mooncake_jax.messages import InstanceLoad, RoleStatus
from mooncake_jax.prefill.job import KVPaths, PrefillJob
from mooncake_jax.prefill.worker import PrefillWorker
from mooncake_jax.request import FirstToken, PrefillDone, PrefillRequest, StagingHandle
from mooncake_jax.staging_layout import StagingLayout


class PrefillService:
    """Handler of the PREFILL table."""

    def __init__(self, name: str, epoch: int, engine: PrefillEngine, worker: PrefillWorker, paths: KVPaths):
        self._name, self._epoch = name, epoch
        self._engine, self._worker, self._paths = engine, worker, paths
        self._lock = threading.Lock()
        self._open: set[PrefillJob] = set()

    def prefill(
        self, request: PrefillRequest, context: grpc.ServicerContext
    ) -> Iterator[FirstToken | PrefillDone]:
        """Raises StaleError for another epoch, InvalidError for a request that does not fit or keys that differ,
        ExhaustedError when the queue is full, UnavailableError when decode or this instance goes away."""
        self._validate(request)
        with self._job(request) as job:
            if not context.add_callback(job.cancel):
                return
            self._worker.submit(job)
            event = job.events.get()
            if isinstance(event, StoreError):
                raise event
            if event is None:
                return
            yield event
            done = job.finish()
            if job.cancelled:
                return
        yield done

    def status(self, request: Empty) -> RoleStatus:
        return RoleStatus(self._worker.is_ready, self.books())

    def books(self) -> dict[str, float]:
        """What requests hold here: all zero when idle."""
        home = self._paths.home.stats()
        return {
            "open_requests": len(self._jobs()),
            "queued_requests": len(self._worker.jobs()),
            "used_slots": self._worker.num_used_slots,
            "nbytes_in_flight": sum(job.pending_nbytes for job in self._jobs()),
            "home_leases": home["leases"],
            "home_reserved": home["reserved"],
        }

    def beats(self) -> Callable[[], InstanceLoad]:
        """`load` for the heartbeats to one Conductor, each with the fetches since the one before."""
        num_told = self._paths.fetch_times.since(0)[1]

        def beat() -> InstanceLoad:
            nonlocal num_told
            fetches, num_told = self._paths.fetch_times.since(num_told)
            return msgspec.structs.replace(self.load(), fetches=fetches)

        return beat

    def load(self) -> InstanceLoad:
        """What this instance has to do, and its counters."""
        transfer = self._paths.transfer.counters()
        failed_transfers = transfer.pop("failed")
        return InstanceLoad(
            name=self._name,
            epoch=self._epoch,
            request_ids=[job.request.request_id for job in self._jobs()],
            queued_tokens=sum(job.remaining_tokens for job in self._worker.jobs()),
            used_slots=self._worker.num_used_slots,
            kv_tokens=0,
            tokens_per_second=self._worker.tokens_per_second,
            counters={
                **{name: float(value) for name, value in transfer.items()},
                "failed_transfers": float(failed_transfers),
                "compiles_after_ready": float(self._engine.compiles_after_ready),
                "home_evicted": float(self._paths.home.stats()["evicted"]),
            },
        )

    def _jobs(self) -> list[PrefillJob]:
        with self._lock:
            return list(self._open)

    @contextmanager
    def _job(self, request: PrefillRequest) -> Iterator[PrefillJob]:
        """A job that holds nothing any more when the block ends."""
        job = PrefillJob(request, self._paths, self._worker.wake)
        with self._lock:
            self._open.add(job)
        try:
            yield job
        finally:
            job.cancel()
            self._worker.let_go(job)
            job.close()
            with self._lock:
                self._open.discard(job)

    def _validate(self, request: PrefillRequest) -> None:
        prompt, placement, z = request.request, request.placement, self._engine.format.block_tokens
        if (placement.prefill.name, placement.prefill.epoch) != (self._name, self._epoch):
            raise StaleError(
                f"placed on {placement.prefill.name!r} epoch {placement.prefill.epoch:x}; this is"
                f" {self._name!r} epoch {self._epoch:x}: ask for a new placement"
            )
        if placement.request_id != prompt.request_id:
            raise InvalidError(
                f"placement of request {placement.request_id!r} used for {prompt.request_id!r}"
            )
        num_tokens = len(prompt.tokens)
        check_length(self._engine, num_tokens, prompt.max_tokens)
        check_tokens(self._engine, prompt.tokens)
        keys = chain_keys(root_key(self._engine.fingerprint, prompt.salt), prompt.tokens, z)
        if keys != placement.keys:
            raise InvalidError(
                f"the placement's {len(placement.keys)} block keys are not those of this prompt and model"
                f" ({len(keys)} blocks of {z} tokens): weights, salt or tokens differ between roles"
            )
        if request.staging is not None:
            self._validate_staging(request.staging, num_tokens)

    def _validate_staging(self, staging: StagingHandle, num_tokens: int) -> None:
        layout = StagingLayout(self._engine.format, self._engine.format.num_blocks(num_tokens))
        if staging.num_blocks != layout.num_blocks:
            raise InvalidError(
                f"staging of {staging.num_blocks} blocks for a prompt of {layout.num_blocks}: reserve again"
            )
        if staging.offset + layout.nbytes > staging.segment.nbytes:
            raise InvalidError(
                f"staging at byte {staging.offset} of {layout.nbytes} bytes passes the end of segment"
                f" {staging.segment.name!r} of {staging.segment.nbytes} bytes"
            )

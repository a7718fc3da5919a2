"""KV on its way out: a layer group's new KV goes home and into decode's staging while the next computes.

One thread per request delivers pieces in order: new KV first, reused prefix blocks in the gaps. A flag is
written only after the bytes it stands for have arrived, so a flag that decode sees is a promise kept. (Paper
§5.2: layer-wise prefill.)
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InternalError, StoreError, UnavailableError
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.request import Opcode, TransferRequest
from kvstore.transfer.status import TransferError, TransferState
from mooncake_jax.engine.contract import GroupKV
from mooncake_jax.prefill.home_copy import HomeCopy
from mooncake_jax.prefill.lease import StagingLease
from mooncake_jax.staging_layout import FLAG_DTYPE, StagingLayout

# Prefix blocks go in pieces of this size, so that new KV does not wait long behind them.
_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True)
class _Piece:
    """The same layer groups of consecutive blocks."""

    first_block: int
    first_group: int
    parts: list[np.ndarray]  # per block: its bytes of these groups, uint8, contiguous
    crcs: list[Sequence[int]] | None  # per block, per group; None: not known yet
    is_new: bool  # to be kept at the home node as well

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class KVStream:
    """Delivers the KV of one request.

    The worker adds, never waits; `finish` or `close` ends it, from any thread.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        layout: StagingLayout,
        *,
        staging: StagingLease | None,
        home: HomeCopy,
        on_progress: Callable[[], None],
        again: bool = False,
    ):
        """`again`: an earlier stream to this staging was given up, so its flags are cleared first."""
        self._transfer, self._layout = transfer, layout
        self._staging, self._home = staging, home
        self._on_progress = on_progress
        self._flags = np.zeros(layout.flags_shape, FLAG_DTYPE)
        self._again = again
        self._changed = threading.Condition()
        self._new: deque[_Piece] = deque()
        self._prefix: deque[_Piece] = deque()
        self._sealed = self._stopped = False
        self._pending_nbytes = self._streamed_nbytes = 0
        self._failure: StoreError | None = None
        self._thread = threading.Thread(target=self._run, name="kv-stream")
        self._thread.start()

    @property
    def pending_nbytes(self) -> int:
        """Bytes added and not yet delivered."""
        return self._pending_nbytes

    @property
    def streamed_nbytes(self) -> int:
        """KV bytes that have arrived at decode."""
        return self._streamed_nbytes

    @property
    def failure(self) -> StoreError | None:
        """Why the stream broke off; None while it is well."""
        return self._failure

    def add_new(self, kv: GroupKV, num_tokens: int) -> None:
        """New KV of a tile; keeps `kv.blocks` alive, and reads only the rows of its `num_tokens` tokens."""
        z = self._layout.format.block_tokens
        blocks = list(kv.blocks[: self._layout.format.num_blocks(num_tokens)])
        if num_tokens % z:
            whole = np.zeros_like(blocks[-1])
            whole[..., : num_tokens % z, :] = blocks[-1][..., : num_tokens % z, :]
            blocks[-1] = whole
        parts = [np.ascontiguousarray(block).reshape(-1).view(np.uint8) for block in blocks]
        self._add(self._new, _Piece(kv.first_block, kv.group, parts, None, is_new=True))

    def add_prefix(
        self, first_block: int, blocks: Sequence[np.ndarray], crcs: list[Sequence[int]] | None = None
    ) -> None:
        """Whole reused blocks (uint8, `[BlockFormat.nbytes]` each), and the crc32s of their groups if known."""
        if self._staging is None:
            return
        step = max(1, _PIECE_NBYTES // self._layout.format.nbytes)
        for start in range(0, len(blocks), step):
            some = crcs[start : start + step] if crcs is not None else None
            piece = _Piece(first_block + start, 0, list(blocks[start : start + step]), some, is_new=False)
            self._add(self._prefix, piece)

    def finish(self) -> None:
        """Nothing more will be added: returns when all of it has arrived, or the stream was stopped.

        Raises UnavailableError when decode cannot be reached or its lease was left unused for too long,
        InternalError when something else went wrong.
        """
        with self._changed:
            self._sealed = True
            self._changed.notify_all()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Drops what is queued. Does not wait for the piece on its way: `close` does."""
        with self._changed:
            self._stopped = True
            self._drop_queued()
            self._changed.notify_all()

    def close(self) -> None:
        """Stops, and returns when no write is in flight any more. The home node keeps what was complete."""
        self.stop()
        self._thread.join()
        self._home.close()

    def _add(self, queue: deque[_Piece], piece: _Piece) -> None:
        with self._changed:
            if self._stopped or self._failure is not None:
                return
            queue.append(piece)
            self._pending_nbytes += piece.nbytes
            self._changed.notify_all()

    def _drop_queued(self) -> None:
        for queue in (self._new, self._prefix):
            self._pending_nbytes -= sum(piece.nbytes for piece in queue)
            queue.clear()

    def _next(self) -> _Piece | None:
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._prefix or self._sealed or self._stopped)
            if self._stopped or not (self._new or self._prefix):
                return None
            return (self._new or self._prefix).popleft()

    def _run(self) -> None:
        try:
            if self._staging is not None:
                self._staging.check(time.monotonic())  # before anything is computed in vain
                if self._again:
                    self._write_flags(self._staging, 0, self._layout.num_blocks)
            while (piece := self._next()) is not None:
                try:
                    self._deliver(piece)
                finally:
                    with self._changed:
                        self._pending_nbytes -= piece.nbytes
                self._on_progress()
        except TransferError as error:
            where = self._staging.handle.instance if self._staging else "nowhere"
            self._fail(UnavailableError(f"KV stream to decode instance {where!r}: {error}"))
        except StoreError as error:
            self._fail(error)
        except Exception as error:
            self._fail(InternalError(f"KV stream: {type(error).__name__}: {error}"))

    def _fail(self, error: StoreError) -> None:
        with self._changed:
            self._failure = error
            self._drop_queued()
        self._on_progress()

    def _deliver(self, piece: _Piece) -> None:
        batch = self._submit(piece)
        try:
            crcs = piece.crcs or [self._crcs_of(part) for part in piece.parts]
            if piece.is_new:
                for block, (part, (crc,)) in enumerate(
                    zip(piece.parts, crcs, strict=True), piece.first_block
                ):
                    self._home.write(block, piece.first_group, part, crc)
        finally:
            statuses = self._transfer.wait(batch)
            self._transfer.free_batch_id(batch)
        for status in statuses:
            if status.state is not TransferState.COMPLETED:
                raise TransferError(f"{status.state}: {status.reason}")
        if self._staging is None:
            return
        for block, group_crcs in enumerate(crcs, piece.first_block):
            for group, crc in enumerate(group_crcs, piece.first_group):
                self._flags[block, group] = (self._staging.handle.generation, crc)
        sent = time.monotonic()
        self._write_flags(self._staging, piece.first_block, len(piece.parts))
        self._staging.renew(sent)
        self._streamed_nbytes += piece.nbytes

    def _submit(self, piece: _Piece) -> int:
        requests = []
        if self._staging is not None:
            self._staging.check(time.monotonic())
            segment, base = self._staging.handle.segment, self._staging.handle.offset
            requests = [
                TransferRequest(
                    Opcode.WRITE,
                    part.data,
                    segment,
                    base + self._layout.part_offset(block, piece.first_group),
                )
                for block, part in enumerate(piece.parts, piece.first_block)
            ]
        batch = self._transfer.allocate_batch_id(len(requests))
        try:
            self._transfer.submit_transfer(batch, requests)
        except BaseException:
            self._transfer.free_batch_id(batch)
            raise
        return batch

    def _write_flags(self, staging: StagingLease, first_block: int, num_blocks: int) -> None:
        staging.check(time.monotonic())
        handle = staging.handle
        rows = self._flags[first_block : first_block + num_blocks]
        offset = handle.offset + first_block * self._layout.row_nbytes
        self._transfer.transfer([TransferRequest(Opcode.WRITE, rows.data, handle.segment, offset)])

    def _crcs_of(self, part: np.ndarray) -> list[int]:
        step = self._layout.format.group_nbytes
        return [zlib.crc32(part[start : start + step].data) for start in range(0, part.nbytes, step)]

"""One member of a prefill group: follows the server's orders on its share of the stages, until its epoch ends."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import StoreError
from kvstore.rpc import Stub
from kvstore.transfer import TransferEngine
from kvstore.transfer.request import READ, WRITE, TransferRequest
from kvstore.transfer.segment import Segment
from mooncake_jax.engine.contract import Sampled
from mooncake_jax.engine.group.landing import Landing
from mooncake_jax.engine.group.messages import (
    GROUP,
    Attach,
    Form,
    InsertPrefix,
    Join,
    Order,
    Report,
    Reset,
    RunTick,
)
from mooncake_jax.engine.local_stages import LocalStages
from mooncake_jax.engine.stages import Ran

_TRANSFER_SECONDS = 60.0


class _Begun(NamedTuple):
    order: RunTick
    ran: Ran


class Member:
    """`run` it once, in the thread that is to own JAX: it ends with the process, by `end`.

    `build` joins `jax.distributed` as the order says and makes the stages, everything compiled. `end(reason)` is called in
    whichever thread sees the end, and ends the process: a collective that waits for a lost member cannot be left otherwise.
    """

    def __init__(
        self,
        server_address: str,
        join: Join,
        *,
        transfer: TransferEngine,
        build: Callable[[Form], LocalStages],
        on_ready: Callable[[int], None],
        end: Callable[[str], None],
    ):
        self._join, self._transfer = join, transfer
        self._build, self._on_ready, self._end = build, on_ready, end
        self._stub = Stub(server_address, GROUP, timeout_seconds=30.0)
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()  # None: no more will come
        self._begun: queue.Queue[_Begun | None] = queue.Queue()
        self._segment: Segment | None = None
        self._epoch = 0

    def run(self) -> None:
        """Joins, and follows orders until the epoch ends."""
        threading.Thread(target=self._listen, name="group-orders", daemon=True).start()
        form = self._orders.get()
        if not isinstance(form, Form):
            return
        self._epoch = form.epoch
        try:
            stages = self._build(form)
            threading.Thread(
                target=self._deliver_all, args=(stages,), name="group-delivery", daemon=True
            ).start()
            self._report(0, stages, plan=stages.plan, stages=stages.own_stages)
            self._on_ready(form.epoch)
            while (order := self._orders.get()) is not None:
                self._follow(order, stages)
        except Exception as error:
            self._fail(error)
        finally:
            self._begun.put(None)

    def _listen(self) -> None:
        """The stream of orders says by its end that the epoch has ended, whatever the other threads wait for."""
        reason = "the epoch has ended"
        try:
            for order in self._stub.join(self._join):
                self._orders.put(order)
        except StoreError as error:
            reason = str(error)
        self._end(reason)
        self._orders.put(None)

    def _follow(self, order: Order, stages: LocalStages) -> None:
        if isinstance(order, RunTick):
            tokens, prompt = np.frombuffer(order.tokens, np.int32), np.frombuffer(order.prompt, np.int32)
            ran = stages.tick(tuple(order.chunks), tokens, order.sample, prompt)
            self._begun.put(_Begun(order, ran))
        elif isinstance(order, InsertPrefix):
            blocks = self._prefix(order, stages)
            stages.insert(order.stage, order.slot, order.first_page, blocks)
            if order.stage in stages.own_stages:
                self._report(order.number, stages)
        elif isinstance(order, Reset):
            self._begun.join()  # a drawing has state of its own
            stages.reset()
        elif isinstance(order, Attach):
            self._segment = order.segment
        else:
            raise ValueError(f"an order {type(order).__name__} in the middle of an epoch")

    def _prefix(self, order: InsertPrefix, stages: LocalStages) -> np.ndarray:
        """Zeros where the stage is another member's: its devices take part in the program, and keep what they have."""
        landing, form = Landing(stages.plan), stages.plan.format
        shape = (order.num_blocks, *stages.plan.stage_block_shape)
        if order.stage not in stages.own_stages:
            return np.broadcast_to(np.zeros((), form.item_dtype), shape)
        blocks = np.empty(shape, form.item_dtype)
        self._move(READ, blocks, landing.prefix_offset)
        return blocks

    def _deliver_all(self, stages: LocalStages) -> None:
        landing = Landing(stages.plan)
        try:
            while (begun := self._begun.get()) is not None:
                self._deliver(begun, stages, landing)
                self._begun.task_done()
        except Exception as error:
            self._fail(error)

    def _deliver(self, begun: _Begun, stages: LocalStages, landing: Landing) -> None:
        """New KV of this member's stages into the landing memory, and what was drawn."""
        order, form = begun.order, stages.plan.format
        for stage in stages.own_stages:
            chunk = order.chunks[stage]
            if chunk is not None:
                new = begun.ran.blocks(stage)[: form.num_blocks(chunk.num_tokens)]
                self._move(WRITE, np.ascontiguousarray(new), landing.offset(order.area, stage))
        sampled: Sampled | None = None
        if order.sample is not None and stages.plan.num_stages - 1 in stages.own_stages:
            sampled = begun.ran.sampled()
        self._report(order.number, stages, sampled=sampled)

    def _move(self, opcode: Any, blocks: np.ndarray, offset: int) -> None:
        if self._segment is None:
            raise ValueError("the landing memory was not told")
        local = blocks.reshape(-1).view(np.uint8).data
        self._transfer.transfer([TransferRequest(opcode, local, self._segment, offset)], _TRANSFER_SECONDS)

    def _report(self, number: int, done_by: LocalStages, **fields: Any) -> None:
        self._stub.report(Report(self._epoch, self._join.index, number, compiles=done_by.compiles, **fields))

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(StoreError):  # the server knows already, or has gone
            self._stub.report(Report(self._epoch, self._join.index, 0, error=reason[:2000]))
        self._end(reason)

"""The server's side of a group: who is a member, which epoch it is, and what the members reported."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from kvstore.errors import InvalidError, StaleError
from kvstore.rpc import Empty
from mooncake_jax.engine.contract import EngineLostError
from mooncake_jax.engine.group.messages import Form, Join, Order, Report
from mooncake_jax.engine.stages import PipelinePlan

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    join: Join
    orders: queue.SimpleQueue[Order | None] = field(
        default_factory=queue.SimpleQueue
    )  # None: the epoch has ended


class MemberGroup:
    """Handler of the GROUP table. Members come and go in gRPC threads; one thread gives orders and waits.

    An epoch is *forming* until `num_members` have joined, then *starting* until all reported ready, then ready, until it
    ends. Whatever waits for an epoch that ends raises EngineLostError.
    """

    def __init__(self, num_members: int, *, step_seconds: float = 120.0):
        """`step_seconds`: the most that an order may take once all are ready."""
        if num_members < 1:
            raise ValueError(f"num_members must be positive, got {num_members}")
        self.num_members, self._step_seconds = num_members, step_seconds
        self._changed = threading.Condition()
        self.epoch = 0
        self._members: dict[int, _Member] = {}
        self._reports: dict[tuple[int, int], Report] = {}  # by order and member
        self._ended = ""  # why the last epoch did
        self._plan: PipelinePlan | None = None
        self._closed = False

    # members

    def join(self, request: Join, context: grpc.ServicerContext) -> Iterator[Order]:
        """Orders, until the epoch ends. A second member of one index takes the place of the first, whose epoch ends.

        Raises InvalidError for an index that there is not, StaleError once closed."""
        member = _Member(request)
        with self._changed:
            if self._closed:
                raise StaleError("this group is closed")
            if request.index >= self.num_members:
                raise InvalidError(f"member {request.index} of a group of {self.num_members}")
            if request.index in self._members:
                self._lose(self._members[request.index], f"member {request.index} joined again")
            self._members[request.index] = member
            log.info("member %d joined: %d of %d", request.index, len(self._members), self.num_members)
            if len(self._members) == self.num_members:
                self.epoch += 1
                self._send_locked(Form(self.epoch, self._members[0].join.coordinator, self.num_members))
            self._changed.notify_all()
        if not context.add_callback(lambda: self._left(member)):
            self._left(member)
        while (order := member.orders.get()) is not None:
            yield order

    def report(self, report: Report) -> Empty:
        """Raises StaleError for another epoch."""
        with self._changed:
            if report.epoch != self.epoch or report.index not in self._members:
                raise StaleError(f"epoch {report.epoch} of this group has ended")
            if report.error:
                self._end(f"member {report.index}: {report.error}")
            elif report.plan is not None and self._plan not in (None, report.plan):
                self._end(
                    f"member {report.index} has another model or mesh than the group had: {report.plan}"
                )
            else:
                self._plan = report.plan or self._plan
                self._reports[report.number, report.index] = report
            self._changed.notify_all()
        return Empty()

    # the server

    @property
    def plan(self) -> PipelinePlan:
        """Of the first epoch that got ready, and of all later ones."""
        if self._plan is None:
            raise EngineLostError("no group of members was ever ready")
        return self._plan

    def is_ready(self, epoch: int) -> bool:
        """Whether `epoch` began, and has not ended."""
        with self._changed:
            return epoch == self.epoch and self._is_whole() and not self._missing(0)

    def wait_ready(self, timeout_seconds: float) -> dict[int, Report]:
        """What each member of the new epoch reported. Raises EngineLostError when that takes longer."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_whole() and not self._missing(0), timeout_seconds):
                joined = f"{len(self._members)} of {self.num_members} members of the prefill group joined"
                raise EngineLostError(f"{joined}; the last epoch ended: {self._ended or 'there was none'}")
            return {index: self._reports[0, index] for index in self._members}

    def send(self, epoch: int, order: Order) -> None:
        """To all members of `epoch`. Raises EngineLostError when it has ended."""
        with self._changed:
            self._check(epoch)
            self._send_locked(order)

    def wait(self, epoch: int, number: int, index: int) -> Report:
        """What member `index` reported of an order. Raises EngineLostError when the epoch ends before, or it takes longer
        than a step may."""
        with self._changed:
            deadline = time.monotonic() + self._step_seconds
            while True:
                self._check(epoch)
                if (number, index) in self._reports:
                    return self._reports[number, index]
                if not self._changed.wait(deadline - time.monotonic()):
                    self._end(f"member {index} did not finish order {number} in {self._step_seconds:g} s")

    def forget(self, before: int) -> None:
        """Reports of orders 1 … `before`-1 are not needed any more."""
        with self._changed:
            self._reports = {key: r for key, r in self._reports.items() if not 0 < key[0] < before}

    def close(self) -> None:
        """All members end."""
        with self._changed:
            self._closed = True
            self._end("the server closed it")
            self._changed.notify_all()

    def _left(self, member: _Member) -> None:
        with self._changed:
            if self._members.get(member.join.index) is member:
                self._lose(member, f"member {member.join.index} is gone")
                self._changed.notify_all()
        member.orders.put(None)

    def _lose(self, member: _Member, why: str) -> None:
        """A whole group ends with any of its members; one that is forming waits for another."""
        if self._is_whole():
            self._end(why)
        else:
            del self._members[member.join.index]
            member.orders.put(None)

    def _end(self, why: str) -> None:
        log.warning("epoch %d of the prefill group ends: %s", self.epoch, why)
        self._ended = why
        for member in self._members.values():
            member.orders.put(None)
        self._members, self._reports = {}, {}

    def _is_whole(self) -> bool:
        return len(self._members) == self.num_members

    def _missing(self, number: int) -> list[int]:
        return [index for index in self._members if (number, index) not in self._reports]

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch or not self._is_whole():
            raise EngineLostError(f"the prefill group lost its epoch {epoch}: {self._ended}")

    def _send_locked(self, order: Order) -> None:
        for member in self._members.values():
            member.orders.put(order)

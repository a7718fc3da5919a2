"""A decode node: requests whose KV has arrived join its batch at the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mooncake_jax.cost_model import NodeCosts
from mooncake_jax.simulation.batch import Batch
from mooncake_jax.simulation.events import EventLoop


class DecodeNode:
    """An event only when the batch changes.

    `joined(request, step)` is called at the edge where a request joins, before its first step `step`;
    `left(requests)` at the end of their last step.
    """

    def __init__(
        self,
        loop: EventLoop,
        costs: NodeCosts,
        *,
        num_slots: int,
        capacity_tokens: int,
        joined: Callable[[int, int], None],
        left: Callable[[list[int]], None],
    ):
        self.batch = Batch(costs)
        self.busy_seconds = 0.0
        self._loop = loop
        self._num_slots, self._capacity_tokens = num_slots, capacity_tokens
        self._joined, self._left = joined, left
        self._coming: deque[tuple[int, int, int]] = deque()
        self._reserved_tokens = 0  # of the batch, when its requests end
        self._reserved: dict[int, int] = {}
        self._edge = 0.0  # when the steps done were done
        self._planned = 0  # steps to the next change; 0: idle
        self._plan = 0  # number of the plan that counts
        self._dead = False

    def add(self, request: int, kv_tokens: int, num_steps: int) -> None:
        """The KV of `request` is here; `num_steps` 1 or more."""
        self._coming.append((request, kv_tokens, num_steps))
        if not self._planned:
            self._edge = self._loop.now
            self._change([])
        elif len(self._coming) == 1 and self._fits(self._coming[0]):
            steps = self.batch.steps_until(self._loop.now - self._edge)
            if steps < self._planned:
                self._schedule(steps)

    def die(self) -> list[int]:
        """No step ends any more. Returns the requests that were here."""
        self._dead = True
        return [*self.batch.requests, *(request for request, _, _ in self._coming)]

    def _fits(self, one: tuple[int, int, int]) -> bool:
        _, kv_tokens, num_steps = one
        return (
            len(self.batch) < self._num_slots
            and self._reserved_tokens + kv_tokens + num_steps <= self._capacity_tokens
        )

    def _schedule(self, steps: int) -> None:
        self._plan += 1
        self._planned = steps
        self._loop.at(self._edge + self.batch.seconds(steps), self._reach, self._plan)

    def _reach(self, plan: int) -> None:
        if plan != self._plan or self._dead:
            return
        self.busy_seconds += self._loop.now - self._edge
        self._edge = self._loop.now
        self._change(self.batch.advance(self._planned))

    def _change(self, left: list[int]) -> None:
        batch, coming = self.batch, self._coming
        for request in left:
            self._reserved_tokens -= self._reserved.pop(request)
        while coming and self._fits(coming[0]):
            request, kv_tokens, num_steps = coming.popleft()
            self._reserved[request] = kv_tokens + num_steps
            self._reserved_tokens += kv_tokens + num_steps
            batch.join(request, kv_tokens, num_steps)
            self._joined(request, batch.step)
        if len(batch):
            self._schedule(batch.steps_to_end())
        else:
            self._planned = 0
        if left:
            self._left(left)

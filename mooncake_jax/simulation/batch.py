"""Continuous batching, many steps at a time: between two changes of a batch its steps are an arithmetic series.

The k-th step after a change takes `first + k * slope` seconds, since each request adds one KV token a step. So a
batch has an event only when a request joins or leaves, and how long `k` steps take is a polynomial.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from mooncake_jax.cost_model import NodeCosts


class StepLog:
    """How long each step of a batch took, and what held it up before."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._slope: list[float] = []
        self._count: list[int] = []
        self._stalls: dict[int, float] = {}

    def add(self, first: float, slope: float, count: int) -> None:
        """`count` steps of `first`, `first + slope`, … seconds."""
        self._first.append(first)
        self._slope.append(slope)
        self._count.append(count)

    def stall(self, step: int, seconds: float) -> None:
        """Whoever was in the batch before `step` waited so long for it."""
        self._stalls[step] = self._stalls.get(step, 0.0) + seconds

    def stalled(self, step: int) -> float:
        """How long `step` has been waited for by now."""
        return self._stalls.get(step, 0.0)

    def durations(self) -> np.ndarray:
        """Seconds of each step `[S]`, the wait before it included."""
        count = np.array(self._count, np.int64)
        starts = np.cumsum(count) - count
        within = np.arange(int(count.sum())) - np.repeat(starts, count)
        seconds = np.repeat(np.array(self._first), count) + np.repeat(np.array(self._slope), count) * within
        if self._stalls:
            steps = np.fromiter(self._stalls, np.int64)
            inside = steps < len(seconds)
            seconds[steps[inside]] += np.fromiter(self._stalls.values(), np.float64)[inside]
        return seconds


class Batch:
    """The requests that decode together on one node, counted in steps; knows no clock."""

    def __init__(self, costs: NodeCosts):
        self.log = StepLog()
        self.step = 0  # steps done
        self.kv_tokens = 0
        self._ends: list[tuple[int, int, int]] = []  # (last step, request, KV tokens then)
        self._first = self._slope = 0.0  # seconds of the next step, and what each further one takes more
        self._base = costs.decode_base_seconds - costs.decode_seconds_per_extra_request
        self._per_request = costs.decode_seconds_per_extra_request
        self._per_token = costs.decode_seconds_per_kv_token

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def requests(self) -> list[int]:
        return [request for _, request, _ in self._ends]

    def join(self, request: int, kv_tokens: int, num_steps: int) -> None:
        """`request` takes part in the next `num_steps` (1 or more) steps."""
        heapq.heappush(self._ends, (self.step + num_steps, request, kv_tokens + num_steps))
        self.kv_tokens += kv_tokens
        self._changed()

    def next_seconds(self) -> float:
        """What the next step takes."""
        return self._first

    def steps_to_end(self) -> int:
        """Until the first request leaves."""
        return self._ends[0][0] - self.step

    def seconds(self, count: int) -> float:
        """What the next `count` steps take, if nobody joins."""
        return count * (self._first + self._slope * (0.5 * (count - 1)))

    def steps_until(self, seconds: float) -> int:
        """The fewest steps that take at least `seconds`."""
        first, slope = self._first, self._slope
        middle = first - 0.5 * slope
        root = math.sqrt(middle * middle + 2.0 * slope * seconds) if slope else 0.0
        count = max(int((root - middle) / slope if slope else seconds / first), 0)
        while count and (count - 1) * (first + slope * (0.5 * (count - 2))) >= seconds:
            count -= 1
        while count * (first + slope * (0.5 * (count - 1))) < seconds:
            count += 1
        return count

    def advance(self, count: int) -> list[int]:
        """Do `count` steps, at most to the first end; returns who left."""
        if not count:
            return []
        self.log.add(self._first, self._slope, count)
        return self._passed(count)

    def advance_one(self, seconds: float) -> list[int]:
        """Do one step that takes `seconds`, since it also did something else; returns who left."""
        self.log.add(seconds, 0.0, 1)
        return self._passed(1)

    def _passed(self, count: int) -> list[int]:
        ends = self._ends
        self.step += count
        self.kv_tokens += count * len(ends)
        left = []
        while ends and ends[0][0] == self.step:
            _, request, kv_tokens = heapq.heappop(ends)
            self.kv_tokens -= kv_tokens
            left.append(request)
        self._changed()
        return left

    def _changed(self) -> None:
        num = len(self._ends)
        self._first = self._base + self._per_request * num + self._per_token * self.kv_tokens
        self._slope = self._per_token * num

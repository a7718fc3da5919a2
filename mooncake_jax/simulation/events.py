"""The clock of a simulation: a heap of what will happen, and the arrivals beside it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

Argument = TypeVar("Argument")


class EventLoop:
    """Calls handlers in the order of their times; equal times in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable, object]] = []

    def at(self, time: float, handler: Callable[[Argument], object], argument: Argument) -> None:
        """Call `handler(argument)` at `time`, which is not before now."""
        self.num_events += 1
        heapq.heappush(self._heap, (time, self.num_events, handler, argument))

    def run(self, times: Sequence[float], arrive: Callable[[int], object]) -> None:
        """`arrive(i)` at `times[i]` (in order), and everything that follows, until nothing is left."""
        heap, pop = self._heap, heapq.heappop
        for index, time in enumerate(times):
            while heap and heap[0][0] <= time:
                self.now, _, handler, argument = pop(heap)
                handler(argument)
            self.now = time
            arrive(index)
        while heap:
            self.now, _, handler, argument = pop(heap)
            handler(argument)

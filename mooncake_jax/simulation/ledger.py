"""What became of every request, and the figures one asks of that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from mooncake_jax.simulation.batch import StepLog
from mooncake_jax.simulation.workload import Workload

_ROWS = 256


class State(IntEnum):
    OPEN = 0
    FINISHED = 1
    REJECTED = 2
    FAILED = 3


class UnaccountedError(Exception):
    """A run ended and left requests that are neither finished, rejected nor failed: a fault of the simulator."""


class Ledger:
    """One list per column, by request number; written by the parts of a simulation as it goes."""

    def __init__(self, workload: Workload):
        num = len(workload)
        self.workload = workload
        self.state = [State.OPEN] * num
        self.first_token_at = [0.0] * num
        self.node = [-1] * num  # whose batch it joined
        self.first_step = [0] * num
        self.first_wait = [0.0] * num  # from the first token to that step, beyond the step's own time
        self.prefix_tokens = [0] * num  # reused
        self.fetched_tokens = [0] * num
        self.transfer_seconds = [0.0] * num  # prefill to decode, while the NICs had it

    def end(self, request: int, state: State) -> None:
        """Raises UnaccountedError when it has ended before."""
        if self.state[request] != State.OPEN:
            raise UnaccountedError(f"request {request} ended twice: {self.state[request].name}, {state.name}")
        self.state[request] = state

    def close(self, logs: list[StepLog]) -> Outcomes:
        """Raises UnaccountedError when a request is open."""
        state = np.array(self.state, np.int8)
        if (open_ones := (state == State.OPEN).nonzero()[0]).size:
            raise UnaccountedError(
                f"{open_ones.size} of {len(state)} requests never ended, the first is number {open_ones[0]}"
            )
        workload = self.workload
        num_intervals = np.array(workload.num_outputs, np.int64) - 1
        finished = state == State.FINISHED
        longest, mean = _intervals(
            logs,
            np.array(self.node),
            np.array(self.first_step),
            np.array(self.first_wait),
            np.where(finished, num_intervals, 0),
        )
        return Outcomes(
            state=state,
            num_tokens=np.array(workload.num_tokens),
            ttft_seconds=np.where(
                finished, np.array(self.first_token_at) - np.array(workload.arrivals), np.inf
            ),
            tbt_seconds=np.where(finished, longest, np.inf),
            mean_tbt_seconds=np.where(finished, mean, np.inf),
            prefix_tokens=np.array(self.prefix_tokens),
            fetched_tokens=np.array(self.fetched_tokens),
            transfer_seconds=np.array(self.transfer_seconds),
        )


@dataclass(frozen=True, eq=False)
class Outcomes:
    """All requests `[N]`; times of those that did not finish are infinite."""

    state: np.ndarray
    num_tokens: np.ndarray
    ttft_seconds: np.ndarray
    tbt_seconds: np.ndarray  # mean of the longest 10 % of a request's token intervals (§5.1); 0 without any
    mean_tbt_seconds: np.ndarray
    prefix_tokens: np.ndarray
    fetched_tokens: np.ndarray
    transfer_seconds: np.ndarray

    @property
    def finished(self) -> np.ndarray:
        return self.state == State.FINISHED

    def count(self, state: State) -> int:
        return int((self.state == state).sum())

    def effective(self, ttft_slo_seconds: float, tbt_slo_seconds: float) -> float:
        """Effective request capacity: the share of all arrivals that met both."""
        met = (self.ttft_seconds <= ttft_slo_seconds) & (self.tbt_seconds <= tbt_slo_seconds)
        return float((met & self.finished).mean())

    @property
    def mean_ttft_seconds(self) -> float:
        """Of the finished; nan if there are none."""
        return float(self.ttft_seconds[self.finished].mean()) if self.finished.any() else float("nan")

    @property
    def hit_rate(self) -> float:
        """Share of the finished requests' prompt tokens that was reused."""
        finished = self.finished
        return float(self.prefix_tokens[finished].sum() / max(self.num_tokens[finished].sum(), 1))


def _intervals(
    logs: list[StepLog],
    node: np.ndarray,
    first_step: np.ndarray,
    first_wait: np.ndarray,
    count: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    # per request: mean of the longest tenth of its intervals, and of all; 0 without intervals
    longest, mean = np.zeros(len(node)), np.zeros(len(node))
    for number, log in enumerate(logs):
        mine = ((node == number) & (count > 0)).nonzero()[0]
        if not mine.size:
            continue
        durations = log.durations()
        mine = mine[np.argsort(count[mine], kind="stable")]
        for start in range(0, len(mine), _ROWS):
            rows = mine[start : start + _ROWS]
            lengths, first = count[rows], first_step[rows]
            columns = np.arange(lengths[-1])
            steps = first[:, None] + columns
            inside = columns < lengths[:, None]
            values = np.where(inside, durations.take(steps, mode="clip"), 0.0)
            values[:, 0] += first_wait[rows]
            mean[rows] = values.sum(1) / lengths
            num_longest = -(-lengths // 10)
            most = num_longest[-1]
            values.partition(lengths[-1] - most, axis=1)
            top = np.sort(values[:, lengths[-1] - most :], axis=1)
            kept = np.arange(most) >= (most - num_longest)[:, None]
            longest[rows] = np.where(kept, top, 0.0).sum(1) / num_longest
    return longest, mean

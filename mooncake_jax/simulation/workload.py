"""A trace as a simulation wants it: one list per column."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.errors import InvalidError
from mooncake_jax.trace import Trace


@dataclass(frozen=True)
class Workload:
    """Requests by number, in the order of their arrival."""

    name: str
    arrivals: list[float]  # seconds
    num_tokens: list[int]  # of the prompts
    num_outputs: list[int]  # tokens of the answers
    chains: list[list[int]]  # ids of the prompts' full blocks

    def __len__(self) -> int:
        return len(self.arrivals)

    @classmethod
    def of(cls, trace: Trace, *, rate: float = 1.0) -> Workload:
        """`rate` 2 lets requests come twice as fast as their timestamps say. Raises InvalidError."""
        if not rate > 0.0:
            raise InvalidError(f"rate {rate}: expected a positive number")
        requests = trace.requests
        return cls(
            name=trace.name,
            arrivals=[request.timestamp / 1000.0 / rate for request in requests],
            num_tokens=[request.input_length for request in requests],
            num_outputs=[request.output_length for request in requests],
            chains=[request.hash_ids[: request.full_blocks] for request in requests],
        )

    def with_one_output(self) -> Workload:
        """The same prompts with answers of one token: prefill alone."""
        return replace(self, num_outputs=[1] * len(self))

"""What can be set on a prefill instance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillConfig:
    """Limits of one prefill instance; sizes are bytes of KV."""

    max_queue: int = 64  # requests queued or running; one more is ExhaustedError
    # seconds of head start that a second of waiting is worth, 0 … 1; 0: always the shortest first
    aging: float = 0.5
    # a request with more KV not yet delivered computes no further tile
    max_request_nbytes_in_flight: int = 64 << 20
    # with more than this over all requests that still compute, no new one starts
    max_nbytes_in_flight: int = 256 << 20

    def __post_init__(self) -> None:
        if self.max_queue < 1 or self.max_request_nbytes_in_flight < 1 or self.max_nbytes_in_flight < 1:
            raise ValueError(f"limits of a prefill instance must be positive: {self}")
        if not 0 <= self.aging <= 1:
            raise ValueError(f"aging must be between 0 and 1, got {self.aging}")

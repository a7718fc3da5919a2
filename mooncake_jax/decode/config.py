"""What can be set on a decode instance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """Limits of one decode instance; times are seconds."""

    staging_nbytes: int = 256 << 20  # registered memory that prefill instances stream KV into
    # a reservation that nobody uses, and no KV arrives in, ends after this; prefill leaves the
    # last quarter unused, which should be no shorter than the transfer timeout
    staging_lease_seconds: float = 60.0
    # memory of a broken-off stream rests this long; at least the transfer timeout
    quarantine_seconds: float = 15.0
    arrival_seconds: float = 10.0  # how long `generate` waits for KV that is still on its way
    max_waiting: int = 32  # requests reserved or waiting beyond the batch's slots; one more is ExhaustedError
    max_saving_blocks: int = 64  # answer blocks on their way to the home node; more are not kept

    def __post_init__(self) -> None:
        for name in ("staging_nbytes", "staging_lease_seconds", "quarantine_seconds", "arrival_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_waiting", "max_saving_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

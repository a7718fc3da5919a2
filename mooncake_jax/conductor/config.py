"""Settings of the Conductor."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.policy import POLICIES, PolicyName


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision depends on besides its inputs; the first line of a decision log."""

    policy: PolicyName = "global"
    balancing_threshold: float = 2.0  # kvcache_balancing_threshold; inf: never fetch
    ttft_slo_seconds: float = 0.0  # 0: no limit
    tbt_slo_seconds: float = 0.0  # 0: no limit
    max_waiting_prompts: int = 256  # per prefill instance, beyond those in its slots
    decode_overcommit: float = 4.0  # requests and tokens booked per slot and token
    max_retry_after_seconds: float = 60.0
    cost: CostModel = CostModel()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: expected one of {sorted(POLICIES)}")
        for name in ("balancing_threshold", "ttft_slo_seconds", "tbt_slo_seconds", "max_waiting_prompts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not self.decode_overcommit >= 1.0:
            raise ValueError(f"decode_overcommit must be 1 or more, got {self.decode_overcommit}")
        if not self.max_retry_after_seconds > 0.0:
            raise ValueError(f"max_retry_after_seconds must be positive, got {self.max_retry_after_seconds}")


@dataclass(frozen=True)
class ConductorConfig:
    """One Conductor."""

    directory_address: str = ""  # of the KVCache store's directory; "": no store, every prefix is empty
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    auto_threshold: bool = False  # adapt `schedule.balancing_threshold` to what requests would cost
    heartbeat_seconds: float = 1.0  # what instances are expected to keep
    max_missed_heartbeats: int = 3
    booking_seconds: float = 60.0  # a booking that nobody mentions for so long is over
    expected_block_seconds: float = 3.0  # from the end of a prefill to the announcement of its blocks
    decision_log_path: str = ""  # JSON lines; "": only the last decisions, in memory
    decision_log_nbytes: int = (
        256 << 20
    )  # the file starts afresh beyond this; the one before is kept as PATH.1
    num_logged_decisions: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("heartbeat_seconds", "max_missed_heartbeats", "booking_seconds", "num_logged_decisions")
        for name in (*positive, "decision_log_nbytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.expected_block_seconds >= 0.0:
            raise ValueError(f"expected_block_seconds must be 0 or more, got {self.expected_block_seconds}")

    @property
    def instance_timeout_seconds(self) -> float:
        """An instance silent for so long is dropped."""
        return self.heartbeat_seconds * self.max_missed_heartbeats

"""The Conductor: who serves a request, and from where its prefix comes (paper §4)."""

from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.config import ConductorConfig, ScheduleConfig
from mooncake_jax.conductor.decision_log import DecisionLog, read_decision_log, replay
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.service import ConductorService

__all__ = [
    "Conductor",
    "ConductorConfig",
    "ConductorService",
    "CostModel",
    "DecisionLog",
    "ScheduleConfig",
    "read_decision_log",
    "replay",
]

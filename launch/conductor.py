"""The Conductor: decides where each request runs (Algorithm 1).

    python -m launch.conductor --port=9001 --directory=127.0.0.1:9000

Instances register by themselves. Ask it who is alive:

    python -c "from mooncake_jax.messages import CONDUCTOR; from kvstore.rpc import Empty, Stub; \\
               print(Stub('127.0.0.1:9001', CONDUCTOR).cluster(Empty()))"
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from absl import flags

from kvstore.errors import InvalidError
from kvstore.rpc import Server
from launch.flags import define
from launch.process import UsageError, run_role
from mooncake_jax.conductor.config import ConductorConfig, ScheduleConfig
from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.policy import POLICIES
from mooncake_jax.conductor.service import ConductorService
from mooncake_jax.conductor.threshold import DEFAULT
from mooncake_jax.cost_model import CostModelFile

define("host", "port", "directory")
POLICY = flags.DEFINE_enum("policy", "global", sorted(POLICIES), "How the prefill instance is chosen.")
THRESHOLD = flags.DEFINE_string(
    "kvcache_balancing_threshold",
    "2.0",
    "Fetch a prefix when another node holds more than this many times the blocks; inf: never; auto: adapts.",
)
COST_MODEL = flags.DEFINE_string(
    "cost_model",
    "",
    "Cost model of the prefill and decode instances: a file that launch.profile wrote, or the name of one that "
    "comes along; empty: slow defaults.",
)
TIME_SCALE = flags.DEFINE_float(
    "time_scale", 1.0, "Of emulated instances: real seconds that a second of --cost_model takes.", 1e-6
)
TTFT_SLO = flags.DEFINE_float("ttft_slo_seconds", 0.0, "Refuse (429) above this forecast; 0: never.", 0.0)
TBT_SLO = flags.DEFINE_float("tbt_slo_seconds", 0.0, "Refuse (429) above this forecast; 0: never.", 0.0)
DECISION_LOG = flags.DEFINE_string("decision_log", "", "File for every decision; in memory only if empty.")
FLAGS = flags.FLAGS
log = logging.getLogger(__name__)


def build(stack: ExitStack) -> tuple[str, str]:
    try:
        is_auto = THRESHOLD.value == "auto"
        schedule = ScheduleConfig(
            policy=POLICY.value,  # pyright: ignore[reportArgumentType]
            balancing_threshold=DEFAULT if is_auto else _number(THRESHOLD.value),
            ttft_slo_seconds=TTFT_SLO.value,
            tbt_slo_seconds=TBT_SLO.value,
            cost=_cost_model(),
        )
        config = ConductorConfig(
            FLAGS.directory, schedule, auto_threshold=is_auto, decision_log_path=DECISION_LOG.value
        )
    except (ValueError, InvalidError) as error:
        raise UsageError(str(error)) from None
    service = ConductorService(config)
    stack.callback(service.close)
    server = Server(service.handlers(), host=FLAGS.host, port=FLAGS.port)
    stack.callback(server.close)
    service.start()
    return "conductor", server.address


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--kvcache_balancing_threshold={text}: expected a number, inf or auto") from None


def _cost_model() -> CostModel:
    if COST_MODEL.value:
        return CostModelFile.load(COST_MODEL.value).costs.estimator().slowed(TIME_SCALE.value)
    log.warning(
        "no --cost_model: forecasts use slow defaults until they are corrected by what is measured; "
        "python -m launch.profile makes a model of this machine"
    )
    return CostModel()


if __name__ == "__main__":
    run_role(build)

"""The Conductor: decides where each request runs (Algorithm 1).

    python -m launch.conductor --port=9001 --directory=127.0.0.1:9000

Instances register by themselves. Ask it who is alive:

    python -c "from mooncake_jax.messages import CONDUCTOR; from kvstore.rpc import Empty, Stub; \\
               print(Stub('127.0.0.1:9001', CONDUCTOR).cluster(Empty()))"
"""

from __future__ import annotations

from contextlib import ExitStack

from absl import flags

from kvstore.rpc import Server
from launch.flags import define
from launch.process import UsageError, run_role
from mooncake_jax.conductor.config import ConductorConfig, ScheduleConfig
from mooncake_jax.conductor.policy import POLICIES
from mooncake_jax.conductor.service import ConductorService

define("host", "port", "directory")
POLICY = flags.DEFINE_enum("policy", "global", sorted(POLICIES), "How the prefill instance is chosen.")
BALANCING_THRESHOLD = flags.DEFINE_float(
    "balancing_threshold", 2.0, "Fetch a prefix when another holds this many times more of it.", 0.0
)
TTFT_SLO = flags.DEFINE_float("ttft_slo_seconds", 0.0, "Refuse (429) above this forecast; 0: never.", 0.0)
TBT_SLO = flags.DEFINE_float("tbt_slo_seconds", 0.0, "Refuse (429) above this forecast; 0: never.", 0.0)
DECISION_LOG = flags.DEFINE_string("decision_log", "", "File for every decision; in memory only if empty.")
FLAGS = flags.FLAGS


def build(stack: ExitStack) -> tuple[str, str]:
    try:
        schedule = ScheduleConfig(
            policy=POLICY.value,  # pyright: ignore[reportArgumentType]
            balancing_threshold=BALANCING_THRESHOLD.value,
            ttft_slo_seconds=TTFT_SLO.value,
            tbt_slo_seconds=TBT_SLO.value,
        )
        config = ConductorConfig(FLAGS.directory, schedule, decision_log_path=DECISION_LOG.value)
    except ValueError as error:
        raise UsageError(str(error)) from None
    service = ConductorService(config)
    stack.callback(service.close)
    server = Server(service.handlers(), host=FLAGS.host, port=FLAGS.port)
    stack.callback(server.close)
    service.start()
    return "conductor", server.address


if __name__ == "__main__":
    run_role(build)

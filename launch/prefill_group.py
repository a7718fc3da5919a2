"""What `launch.prefill` and `launch.prefill_member` share: a prefill instance whose devices are on several hosts.

The instance's own process serves, keeps the store node and never joins `jax.distributed`; on every host a member process
does, restarted by the instance (host 0) or by `launch.prefill` with another --host_index.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from launch.flags import define, transfer_rails
from launch.instance import ENGINE_FLAGS
from launch.process import UsageError
from launch.supervisor import Command, Supervisor, SupervisorError

if TYPE_CHECKING:
    from kvstore.transfer import TransferEngine
    from mooncake_jax.engine.contract import PrefillEngine

_INDEX_VARIABLES = (
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)  # set by Slurm, and by an indexed job of Kubernetes
_SERVER_FLAGS = (
    "port",
    "dram_bytes",
    "ssd_path",
    "ssd_nbytes",
    "engine",
    "cost_model",
    "time_scale",
    "block_tokens",
)
_START_SECONDS = 1800.0
FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # they are the launchers', so that their --help shows them
log = logging.getLogger(__name__)


def define_flags() -> None:
    """For the calling launcher: those of engines, of the mesh and of the group."""
    define(*ENGINE_FLAGS)
    flags.DEFINE_integer("slots", 2, "Prompts in the device cache at a time.", 1)
    flags.DEFINE_string(
        "mesh",
        "",
        "Devices that compute a prompt together, such as stage:4,tensor:2: pipeline stages of layers, and devices that "
        "share the heads of a stage. On the CPU, so many devices are made. Empty: one device, or all cores.",
    )
    flags.DEFINE_integer("chunk", 0, "With --mesh: tokens of a chunk of the pipeline; 0: by platform.", 0)
    flags.DEFINE_string(
        "coordinator",
        "",
        "With --mesh: host:port at which the processes of several hosts meet, an address of host 0. Empty: one host.",
    )
    flags.DEFINE_integer("num_hosts", 1, "With --coordinator: hosts over which the stages are spread.", 1)
    flags.DEFINE_integer(
        "host_index",
        -1,
        f"With --coordinator: which of them this is; host 0 serves. -1: as {' or '.join(_INDEX_VARIABLES)} says.",
        -1,
    )
    flags.DEFINE_string(
        "member_logs", "run", "With --coordinator: folder for the log of this host's member process."
    )


class GroupFlags(NamedTuple):
    """--coordinator, --num_hosts and --host_index, checked."""

    coordinator: str
    num_hosts: int
    host_index: int

    @classmethod
    def read(cls) -> GroupFlags | None:
        """None: one host. Raises UsageError."""
        if not FLAGS.coordinator:
            if FLAGS.num_hosts > 1 or FLAGS.host_index > 0:
                raise UsageError(
                    "--num_hosts and --host_index are for several hosts: give --coordinator=HOST:PORT too"
                )
            return None
        host, _, port = FLAGS.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"--coordinator={FLAGS.coordinator}: expected HOST:PORT, an address of host 0")
        if not FLAGS.mesh:
            raise UsageError("--coordinator spreads the stages of --mesh, which is not given")
        index = FLAGS.host_index
        if index < 0:
            found = [os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name, "").isdecimal()]
            if not found:
                raise UsageError(
                    f"--host_index is not given, and {' and '.join(_INDEX_VARIABLES)} are not set"
                )
            index = int(found[0])
        if index >= FLAGS.num_hosts:
            raise UsageError(f"--host_index={index} of --num_hosts={FLAGS.num_hosts}: they count from 0")
        return cls(FLAGS.coordinator, FLAGS.num_hosts, index)


def keep_member(stack: ExitStack, group: GroupFlags) -> Supervisor:
    """Start this host's member, and again whenever it ends, until the stack is closed."""
    supervisor = Supervisor(Path(FLAGS.member_logs), grace_seconds=5.0)
    stack.callback(supervisor.close)
    own = [
        FLAGS[name].serialize()
        for name in (*ENGINE_FLAGS, "slots", "mesh", "chunk", "coordinator", "num_hosts")
        if FLAGS[name].present and name not in _SERVER_FLAGS
    ]
    argv = ("-m", "launch.prefill_member", *own, f"--host_index={group.host_index}")
    supervisor.start(Command(member_name(group.host_index), argv))
    return supervisor


def member_name(index: int) -> str:
    """In logs and in the name of its log file."""
    return f"{FLAGS.name}-member-{index}"


def serve_group(stack: ExitStack, group: GroupFlags) -> PrefillEngine:
    """The engine of host 0, once all members are ready. Raises UsageError when its own one cannot start."""
    from kvstore.rpc import Server
    from mooncake_jax.engine.group.group import MemberGroup
    from mooncake_jax.engine.group.messages import GROUP
    from mooncake_jax.engine.group.remote_stages import RemoteStages
    from mooncake_jax.engine.pipeline_prefill import PipelinePrefillEngine

    members = MemberGroup(group.num_hosts)
    host, _, port = group.coordinator.rpartition(":")
    server = Server([(GROUP, members)], host=host, port=int(port), max_workers=2 * group.num_hosts + 8)
    stack.callback(server.close)
    stack.callback(members.close)
    supervisor = keep_member(stack, group)
    log.info("waiting for %d members at %s", group.num_hosts, group.coordinator)
    try:
        supervisor.wait_ready([member_name(0)], _START_SECONDS)
    except SupervisorError as error:
        raise UsageError(str(error)) from error
    stages = RemoteStages(members, landing_engine(stack))
    stack.callback(stages.close)
    return PipelinePrefillEngine(stages)


def landing_engine(stack: ExitStack) -> TransferEngine:
    """Moves KV between this process and others of the group."""
    from kvstore.transfer import TransferEngine

    transfer = TransferEngine(host_id=FLAGS.host_id, host=FLAGS.host, **transfer_rails())
    stack.callback(transfer.close)
    return transfer

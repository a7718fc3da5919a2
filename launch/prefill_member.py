"""A member of a prefill group: joins `jax.distributed` with those of the other hosts, and computes its stages.

`launch.prefill --coordinator=…` starts it and starts it again: it ends with its epoch, because a process that has joined
cannot join a second time. Flags are those of `launch.prefill`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from absl import flags

from launch.flags import keep_compiled_programs, pin_to_cores
from launch.instance import engine_arguments
from launch.prefill_group import GroupFlags, define_flags, landing_engine, member_name
from launch.process import UsageError, run_main, stoppable

if TYPE_CHECKING:
    from models.sharding import MeshShape
    from mooncake_jax.engine.group.messages import Form

define_flags()
FLAGS = flags.FLAGS
_JOIN_SECONDS, _HEARTBEAT_SECONDS = 60, 10
log = logging.getLogger(__name__)


def main(_: Sequence[str]) -> None:
    group = GroupFlags.read()
    if group is None:
        raise UsageError("a member needs --coordinator")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    pin_to_cores()
    from launch.devices import check_xla_flags
    from mooncake_jax.engine.group.member import Member
    from mooncake_jax.engine.group.messages import Join
    from mooncake_jax.engine.local_stages import LocalStages, make_plan

    check_xla_flags()
    shape = _mesh(group)
    num_here = shape.num_devices // group.num_hosts
    keep_compiled_programs(FLAGS.compile_cache)
    model = engine_arguments(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens, FLAGS.slots)

    def build(form: Form) -> LocalStages:
        _join(form, group, num_here)
        import jax

        cfg, params = model.pop("cfg"), model.pop("params")
        plan = make_plan(cfg, shape, chunk_tokens=FLAGS.chunk, **model)
        devices = [device for host in range(group.num_hosts) for device in jax.local_devices(host)[:num_here]]
        stages = LocalStages(cfg, params, plan, shape.make(devices))
        stages.start()
        return stages

    def serve() -> None:
        with ExitStack() as stack:
            join = Join(group.host_index, f"{FLAGS.host}:{_free_port(FLAGS.host)}")
            member = Member(
                group.coordinator,
                join,
                transfer=landing_engine(stack),
                build=build,
                on_ready=lambda epoch: print(
                    f"ready {member_name(group.host_index)} epoch:{epoch}", flush=True
                ),
                end=_end,
            )
            member.run()

    stoppable(serve)
    os._exit(0)  # what joined would wait for the others to leave, too


def _mesh(group: GroupFlags) -> MeshShape:
    """--mesh, if each of its stages lies on one host. Raises UsageError."""
    from models.sharding import MeshShape

    try:
        shape = MeshShape.parse(FLAGS.mesh)
    except ValueError as error:
        raise UsageError(f"--mesh={FLAGS.mesh}: {error}") from error
    if shape.stage % group.num_hosts:
        raise UsageError(
            f"--mesh={FLAGS.mesh}: {shape.stage} stages do not divide over {group.num_hosts} hosts, and a stage is not "
            "split over two"
        )
    return shape


def _join(form: Form, group: GroupFlags, num_devices: int) -> None:
    """Every process of the epoch at once: from here on, all devices are one JAX."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.distributed.initialize(
        form.coordinator,
        form.num_members,
        group.host_index,
        initialization_timeout=_JOIN_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    if jax.local_device_count() < num_devices:
        raise ValueError(
            f"--mesh needs {num_devices} devices of each host, here are {jax.local_device_count()}"
        )


def _free_port(host: str) -> int:
    """For `jax.distributed`, if this is member 0."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _end(reason: str) -> NoReturn:
    log.warning("this member ends: %s", reason)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    run_main(main)

"""A prefill instance, with the store node in its process.

    python -m launch.prefill --name=prefill-0 --model=preset:tiny --directory=127.0.0.1:9000 \\
        --conductor=127.0.0.1:9001

With --coordinator, several hosts compute one prompt together: the same command on each of them, where host 0 serves.

    python -m launch.prefill --mesh=stage:2 --coordinator=10.0.0.1:9500 --num_hosts=2 --host_index=0 …

It compiles, then registers at the Conductor. Ask it for its books:

    python -c "from mooncake_jax.messages import PREFILL; from kvstore.rpc import Empty, Stub; \\
               print(Stub('ADDRESS', PREFILL).status(Empty()))"
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from absl import flags

from launch.flags import keep_compiled_programs, pin_to_cores
from launch.huge_pages import use_huge_pages
from launch.instance import emulated_arguments, engine_arguments, instance_config
from launch.prefill_group import GroupFlags, define_flags, keep_member, member_name, serve_group
from launch.process import UsageError, run_role

if TYPE_CHECKING:
    from mooncake_jax.engine.contract import PrefillEngine

define_flags()
MAX_QUEUE = flags.DEFINE_integer("max_queue", 64, "Requests queued or running; more are refused.", 1)
FLAGS = flags.FLAGS


def build(stack: ExitStack) -> tuple[str, str]:
    pin_to_cores()
    from mooncake_jax.instance import start_prefill
    from mooncake_jax.prefill.config import PrefillConfig

    _check_flags()
    group = GroupFlags.read()
    if group is not None and group.host_index > 0:
        keep_member(stack, group)
        return member_name(group.host_index), group.coordinator
    engine = _engine() if group is None else serve_group(stack, group)
    config = instance_config(1 if group is None else group.num_hosts)
    instance = start_prefill(config, engine, PrefillConfig(max_queue=MAX_QUEUE.value))
    stack.callback(instance.close)
    return FLAGS.name, instance.address


def _check_flags() -> None:
    if FLAGS.chunk and not FLAGS.mesh:
        raise UsageError("--chunk is for the pipeline of --mesh, which is not given")
    if FLAGS.mesh and FLAGS.engine == "emulated":
        raise UsageError("--mesh is for real devices: an emulated engine has none")


def _engine() -> PrefillEngine:
    if FLAGS.engine == "emulated":
        from mooncake_jax.engine.emulated import EmulatedPrefillEngine

        return EmulatedPrefillEngine(**emulated_arguments(FLAGS.slots))
    from launch.devices import compute_devices
    from mooncake_jax.engine.jax_prefill import JaxPrefillEngine

    keep_compiled_programs(FLAGS.compile_cache)
    if not FLAGS.mesh:
        devices = compute_devices()
        arguments = engine_arguments(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens, FLAGS.slots)
        return JaxPrefillEngine(**arguments, devices=devices)
    from models.sharding import MeshShape
    from mooncake_jax.engine.local_stages import local_pipeline

    try:
        mesh = MeshShape.parse(FLAGS.mesh)
        devices = compute_devices(mesh.num_devices)
        arguments = engine_arguments(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens, FLAGS.slots)
        return local_pipeline(**arguments, mesh=mesh, chunk_tokens=FLAGS.chunk, devices=devices)
    except ValueError as error:
        raise UsageError(f"--mesh={FLAGS.mesh}: {error}") from error


if __name__ == "__main__":
    use_huge_pages()
    run_role(build)

"""A prefill instance, with the store node in its process.

    python -m launch.prefill --name=prefill-0 --model=preset:tiny --directory=127.0.0.1:9000 \\
        --conductor=127.0.0.1:9001

It compiles, then registers at the Conductor. Ask it for its books:

    python -c "from mooncake_jax.messages import PREFILL; from kvstore.rpc import Empty, Stub; \\
               print(Stub('ADDRESS', PREFILL).status(Empty()))"
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from absl import flags

from launch.flags import define, keep_compiled_programs, pin_to_cores
from launch.huge_pages import use_huge_pages
from launch.instance import ENGINE_FLAGS, emulated_arguments, engine_arguments, instance_config
from launch.process import UsageError, run_role

if TYPE_CHECKING:
    from mooncake_jax.engine.contract import PrefillEngine

define(*ENGINE_FLAGS)
SLOTS = flags.DEFINE_integer("slots", 2, "Prompts in the device cache at a time.", 1)
MESH = flags.DEFINE_string(
    "mesh",
    "",
    "Devices that compute a prompt together, such as stage:4,tensor:2: pipeline stages of layers, and devices that "
    "share the heads of a stage. On the CPU, so many devices are made. Empty: one device, or all cores.",
)
CHUNK = flags.DEFINE_integer("chunk", 0, "With --mesh: tokens of a chunk of the pipeline; 0: by platform.", 0)
MAX_QUEUE = flags.DEFINE_integer("max_queue", 64, "Requests queued or running; more are refused.", 1)
FLAGS = flags.FLAGS


def build(stack: ExitStack) -> tuple[str, str]:
    pin_to_cores()
    from mooncake_jax.instance import start_prefill
    from mooncake_jax.prefill.config import PrefillConfig

    engine = _engine()
    instance = start_prefill(instance_config(), engine, PrefillConfig(max_queue=MAX_QUEUE.value))
    stack.callback(instance.close)
    return FLAGS.name, instance.address


def _engine() -> PrefillEngine:
    if CHUNK.value and not MESH.value:
        raise UsageError("--chunk is for the pipeline of --mesh, which is not given")
    if MESH.value and FLAGS.engine == "emulated":
        raise UsageError("--mesh is for real devices: an emulated engine has none")
    if FLAGS.engine == "emulated":
        from mooncake_jax.engine.emulated import EmulatedPrefillEngine

        return EmulatedPrefillEngine(**emulated_arguments(SLOTS.value))
    from launch.devices import compute_devices
    from mooncake_jax.engine.jax_prefill import JaxPrefillEngine

    keep_compiled_programs(FLAGS.compile_cache)
    if not MESH.value:
        devices = compute_devices()
        arguments = engine_arguments(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens, SLOTS.value)
        return JaxPrefillEngine(**arguments, devices=devices)
    from models.sharding import MeshShape
    from mooncake_jax.engine.pipeline_prefill import PipelinePrefillEngine

    try:
        mesh = MeshShape.parse(MESH.value)
        devices = compute_devices(mesh.num_devices)
        arguments = engine_arguments(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens, SLOTS.value)
        return PipelinePrefillEngine(**arguments, mesh=mesh, chunk_tokens=CHUNK.value, devices=devices)
    except ValueError as error:
        raise UsageError(f"--mesh={MESH.value}: {error}") from error


if __name__ == "__main__":
    use_huge_pages()
    run_role(build)

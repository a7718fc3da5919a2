"""A decode instance, with the store node in its process.

    python -m launch.decode --name=decode-0 --model=preset:tiny --directory=127.0.0.1:9000 \\
        --conductor=127.0.0.1:9001

It compiles, then registers at the Conductor. Ask it for its books:

    python -c "from mooncake_jax.messages import DECODE; from kvstore.rpc import Empty, Stub; \\
               print(Stub('ADDRESS', DECODE).status(Empty()))"
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
    from mooncake_jax.engine.contract import DecodeEngine

define(*ENGINE_FLAGS)
SLOTS = flags.DEFINE_integer("slots", 8, "Requests in a batch.", 1)
STAGING_BYTES = flags.DEFINE_integer("staging_bytes", 512 << 20, "Memory for arriving KV, in bytes.", 1)
MESH = flags.DEFINE_string(
    "mesh",
    "",
    "Devices that share the heads, such as tensor:2. On the CPU, so many devices are made. Empty: one device.",
)
FLAGS = flags.FLAGS


def build(stack: ExitStack) -> tuple[str, str]:
    pin_to_cores()
    from mooncake_jax.decode.config import DecodeConfig
    from mooncake_jax.instance import start_decode

    engine = _engine()
    instance = start_decode(instance_config(), engine, DecodeConfig(staging_nbytes=STAGING_BYTES.value))
    stack.callback(instance.close)
    return FLAGS.name, instance.address


def _engine() -> DecodeEngine:
    if MESH.value and FLAGS.engine == "emulated":
        raise UsageError("--mesh is for real devices: an emulated engine has none")
    if FLAGS.engine == "emulated":
        from mooncake_jax.engine.emulated import EmulatedDecodeEngine

        return EmulatedDecodeEngine(**emulated_arguments(SLOTS.value))
    from launch.devices import check_xla_flags, compute_devices
    from mooncake_jax.engine.jax_decode import JaxDecodeEngine

    keep_compiled_programs(FLAGS.compile_cache)
    check_xla_flags()
    if not MESH.value:
        return JaxDecodeEngine(**engine_arguments(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens, SLOTS.value))
    from models.sharding import MeshShape

    try:
        mesh = MeshShape.parse(MESH.value)
        devices = compute_devices(mesh.num_devices)
        arguments = engine_arguments(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens, SLOTS.value)
        return JaxDecodeEngine(**arguments, mesh=mesh, devices=devices)
    except ValueError as error:
        raise UsageError(f"--mesh={MESH.value}: {error}") from error


if __name__ == "__main__":
    use_huge_pages()
    run_role(build)

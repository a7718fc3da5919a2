"""What the prefill and decode launchers have in common: flags to config and engine arguments.

What takes long to import is imported when it is needed: `--help` and a bad flag are answered at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.flags import TRANSFER_FLAGS, transfer_rails
from launch.process import UsageError

if TYPE_CHECKING:
    from mooncake_jax.instance import InstanceConfig

ENGINE_FLAGS = (
    "name",
    "host",
    "port",
    "host_id",
    *TRANSFER_FLAGS,
    "directory",
    "conductors",
    "model",
    "dtype",
    "max_tokens",
    "dram_bytes",
    "ssd_path",
    "ssd_nbytes",
    "cores",
    "compile_cache",
    "engine",
    "cost_model",
    "time_scale",
    "block_tokens",
)
FLAGS = flags.FLAGS
log = logging.getLogger(__name__)


def engine_arguments(source: str, dtype: str, max_tokens: int, num_slots: int) -> dict[str, Any]:
    """Loads the model: arguments of a JAX engine. `max_tokens` 0: as the model allows. Raises UsageError."""
    from kvstore.block import pool_fingerprint
    from launch.model_source import load
    from mooncake_jax.engine.jax_prefill import block_format

    model = load(source, dtype)
    longest = model.cfg.max_position
    if max_tokens > longest:
        raise UsageError(f"--max_tokens={max_tokens}: the model has positions for {longest}")
    return {
        "cfg": model.cfg,
        "params": model.params,
        "dtype": dtype,
        "num_slots": num_slots,
        "max_tokens": max_tokens or longest,
        "fingerprint": pool_fingerprint(model.fingerprint, block_format(model.cfg, dtype)),
    }


def emulated_arguments(num_slots: int) -> dict[str, Any]:
    """Of an emulated engine, from the shared flags: the bytes of --model, the times of --cost_model.

    Prompts may be longer than the model's positions: it computes nothing. Raises UsageError.
    """
    import dataclasses

    from kvstore.block import pool_fingerprint
    from kvstore.errors import InvalidError
    from launch.model_source import load_without_weights
    from mooncake_jax.cost_model import CostModelFile
    from mooncake_jax.engine.emulated import Pace
    from mooncake_jax.engine.jax_prefill import block_format

    cfg = load_without_weights(FLAGS.model).cfg
    if FLAGS.block_tokens:
        cfg = dataclasses.replace(cfg, block_tokens=FLAGS.block_tokens)
    try:
        costs = CostModelFile.load(FLAGS.cost_model)
    except InvalidError as error:
        raise UsageError(str(error)) from None
    log.warning(
        "emulated: computes nothing; times of %s cost model %s, a modelled second takes %g s",
        costs.kind,
        costs.name,
        FLAGS.time_scale,
    )
    kv = block_format(cfg, FLAGS.dtype)
    return {
        "costs": costs.costs,
        "block_format": kv,
        "fingerprint": pool_fingerprint(b"emulated " + costs.name.encode(), kv),
        "vocab_size": cfg.vocab_size,
        "max_tokens": FLAGS.max_tokens or cfg.max_position,
        "num_slots": num_slots,
        "pace": Pace(FLAGS.time_scale),
    }


def instance_config(num_nodes: int = 1) -> InstanceConfig:
    """From the shared flags, for an engine on so many nodes."""
    from launch.model_source import served_name
    from mooncake_jax.instance import InstanceConfig

    return InstanceConfig(
        name=FLAGS.name,
        model=("emulated:" if FLAGS.engine == "emulated" else "") + served_name(FLAGS.model),
        directory_address=FLAGS.directory,
        conductor_addresses=tuple(FLAGS.conductor),
        host_id=FLAGS.host_id,
        host=FLAGS.host,
        port=FLAGS.port,
        dram_nbytes=FLAGS.dram_bytes,
        ssd_path=FLAGS.ssd_path,
        ssd_nbytes=FLAGS.ssd_nbytes,
        num_nodes=num_nodes,
        **transfer_rails(),
    )

"""A stand-alone store node: DRAM and SSD for KV blocks, without an engine.

    python -m launch.kvstore --name=store-0 --directory=127.0.0.1:9000 --model=preset:tiny

Slots have the size of one KV block of the model, or --slot_bytes. `python -m launch.kvstore_ctl` shows its books.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from absl import flags

from kvstore.node import Node, NodeConfig
from kvstore.node.metrics import MetricsServer
from kvstore.rpc import Server
from kvstore.transfer import TransferEngine
from launch.flags import MODEL_HELP, TRANSFER_FLAGS, define, pin_to_cores, transfer_rails
from launch.process import UsageError, run_role

define("name", "host", "port", "host_id", *TRANSFER_FLAGS, "directory", "dtype", "cores")
define("dram_bytes", "ssd_path", "ssd_nbytes")
MODEL = flags.DEFINE_string("model", "", f"Whose KV blocks fit a slot: {MODEL_HELP}")
SLOT_BYTES = flags.DEFINE_integer("slot_bytes", 0, "Size of a slot, in bytes, instead of --model.", 0)
METRICS_PORT = flags.DEFINE_integer(
    "metrics_port", None, "Port of GET /metrics (Prometheus), 0 for a free one; none if not given.", 0, 65535
)
FLAGS = flags.FLAGS
log = logging.getLogger(__name__)


def build(stack: ExitStack) -> tuple[str, str]:
    pin_to_cores()
    transfer = TransferEngine(host_id=FLAGS.host_id, host=FLAGS.host, **transfer_rails())
    stack.callback(transfer.close)
    config = NodeConfig(
        FLAGS.name,
        FLAGS.host_id,
        FLAGS.dram_bytes,
        _slot_nbytes(),
        ssd_path=FLAGS.ssd_path,
        ssd_nbytes=FLAGS.ssd_nbytes,
    )
    node = Node(config, transfer)
    stack.callback(node.close)
    server = Server(node.handlers(), host=FLAGS.host, port=FLAGS.port)
    stack.callback(server.close)
    if METRICS_PORT.value is not None:
        metrics = MetricsServer(node, transfer, host=FLAGS.host, port=METRICS_PORT.value)
        stack.callback(metrics.close)
        log.info("metrics at http://%s/metrics", metrics.address)
    node.join(FLAGS.directory, server.address)
    return FLAGS.name, server.address


def _slot_nbytes() -> int:
    if SLOT_BYTES.value:
        return SLOT_BYTES.value
    if not MODEL.value:
        raise UsageError("the size of a slot is not known: give --model or --slot_bytes")
    from launch.model_source import load_without_weights
    from mooncake_jax.engine.jax_prefill import block_format

    return block_format(load_without_weights(MODEL.value).cfg, FLAGS.dtype).nbytes


if __name__ == "__main__":
    run_role(build)

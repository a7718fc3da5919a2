"""The OpenAI-compatible HTTP API.

    python -m launch.frontend --model=preset:tiny --conductor=127.0.0.1:9001 --port=8000
    python -m launch.frontend --model=preset:tiny --mode=monolith --port=8000     (everything in one process)

    curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "tiny", "prompt": "The capital of France is", "max_tokens": 8}'
"""

from __future__ import annotations

from contextlib import ExitStack

from absl import flags

from launch.flags import define, keep_compiled_programs, pin_to_cores
from launch.huge_pages import use_huge_pages
from launch.process import UsageError, run_role
from mooncake_jax.frontend.app import build_app
from mooncake_jax.frontend.backend import Backend
from mooncake_jax.frontend.config import FrontendConfig
from mooncake_jax.frontend.dispatch import Dispatcher
from mooncake_jax.frontend.monolith import MonolithBackend, SoloEngine
from mooncake_jax.frontend.server import HttpServer

define("host", "port", "model", "dtype", "max_tokens", "cores", "compile_cache")
MODE = flags.DEFINE_enum(
    "mode", "cluster", ["cluster", "monolith"], "Serve a cluster, or all in one process."
)
CONDUCTOR = flags.DEFINE_list(
    "conductor", [], "host:port of the Conductor, for --mode=cluster; of several, the next one takes over."
)
SERVED_NAME = flags.DEFINE_string("served_model", "", "Name that requests ask for; as --model if empty.")
MAX_CONCURRENT = flags.DEFINE_integer("max_concurrent", 256, "Requests at a time; more are answered 429.", 1)
MAX_BODY = flags.DEFINE_integer("max_body_bytes", 8 << 20, "Largest request body, in bytes.", 1)
CHAT_TOKENS = flags.DEFINE_integer("chat_max_tokens", 1024, "Answer length of a chat that sets none.", 1)
PATIENCE = flags.DEFINE_float("reserve_patience_seconds", 30.0, "Wait for a full decode instance.", 0.0)
FLAGS = flags.FLAGS


def build(stack: ExitStack) -> tuple[str, str]:
    pin_to_cores()
    if MODE.value == "cluster" and not CONDUCTOR.value:
        raise UsageError("--conductor=host:port is missing; without a cluster, use --mode=monolith")
    from launch.model_source import load_without_weights, served_name

    text = load_without_weights(FLAGS.model)
    config = FrontendConfig(
        SERVED_NAME.value or served_name(FLAGS.model),
        text.cfg.vocab_size,
        max_concurrent=MAX_CONCURRENT.value,
        max_body_nbytes=MAX_BODY.value,
        chat_max_tokens=CHAT_TOKENS.value,
    )
    backend = _backend()
    server = HttpServer(lambda: build_app(config, text.tokenizer, backend), host=FLAGS.host, port=FLAGS.port)
    stack.callback(server.close)
    return "frontend", server.address


def _backend() -> Backend:
    if MODE.value == "monolith":
        return MonolithBackend(_monolith)
    return Dispatcher(*CONDUCTOR.value, reserve_patience_seconds=PATIENCE.value)


def _monolith() -> SoloEngine:
    from launch.monolith import load_monolith

    keep_compiled_programs(FLAGS.compile_cache)
    return load_monolith(FLAGS.model, FLAGS.dtype, FLAGS.max_tokens)


if __name__ == "__main__":
    use_huge_pages()
    run_role(build)

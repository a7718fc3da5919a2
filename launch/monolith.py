"""The monolithic engine: a model in this process, without store or other roles."""

from __future__ import annotations

from launch.devices import compute_devices
from launch.instance import engine_arguments
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine
from mooncake_jax.engine.oracle import Monolith

NUM_SLOTS = 2  # a prefill instance's default: its compiled programs are in the cache


def load_monolith(source: str, dtype: str, max_tokens: int, *, for_scores: bool = False) -> Monolith:
    """Loaded and warm. `max_tokens` 0: as long as the model allows. `for_scores`: for `score` only."""
    devices = compute_devices()
    arguments = engine_arguments(source, dtype, max_tokens, num_slots=NUM_SLOTS)
    prefill, decode = JaxPrefillEngine(**arguments, devices=devices), JaxDecodeEngine(**arguments)
    monolith = Monolith(prefill, decode)
    if for_scores:
        prefill.warm_up()
    else:
        monolith.warm_up()
    return monolith

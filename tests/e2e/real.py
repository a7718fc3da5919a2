"""A small random model in float32 on real engines, and the oracle beside it: what e2e tests of equality run on.

The engines are compiled once a test session; clusters borrow them one after the other.
"""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np
import pytest
from e2e.cluster import LocalCluster

from kvstore.block import pool_fingerprint
from models.config import preset
from models.llama import init_params
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.engine.compiles import use_persistent_cache
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine, block_format
from mooncake_jax.engine.oracle import Monolith

CFG = dataclasses.replace(preset("tiny"), max_position=4096)
Z = CFG.block_tokens
NUM_HOME_BLOCKS = 1500
DECODE = DecodeConfig(staging_nbytes=256 << 20, max_waiting=16)


def params(swapped: bool = False):
    tree = init_params(CFG, 0, "float32")
    if swapped:
        tree["layers"][1], tree["layers"][2] = tree["layers"][2], tree["layers"][1]
    return tree


def arguments(num_slots: int, swapped: bool = False) -> dict:
    fingerprint = pool_fingerprint(b"tiny", block_format(CFG, "float32"))
    return {
        "cfg": CFG,
        "params": params(swapped),
        "dtype": "float32",
        "num_slots": num_slots,
        "max_tokens": CFG.max_position,
        "fingerprint": fingerprint,
    }


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """Engines of one test run compile each program once, in whichever of its processes."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    use_persistent_cache(str(base / "compiled"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def oracle(compile_cache):
    monolith = Monolith(JaxPrefillEngine(**arguments(1)), JaxDecodeEngine(**arguments(1)))
    monolith.warm_up()
    return monolith


@pytest.fixture(scope="session")
def engines(compile_cache):
    """Two of each role; a cluster that is closed leaves them as they were."""
    prefill = [JaxPrefillEngine(**arguments(2)) for _ in range(2)]
    decode = [JaxDecodeEngine(**arguments(4)) for _ in range(2)]
    for engine in prefill:
        engine.attach(np.zeros((NUM_HOME_BLOCKS, engine.format.nbytes), np.uint8))
    for engine in (*prefill, *decode):
        engine.warm_up()
    return prefill, decode


def local_cluster(engines, num: int, transport: str, decode_config: DecodeConfig = DECODE) -> LocalCluster:
    prefill, decode = map(iter, engines)
    return LocalCluster(
        num_prefill=num,
        num_decode=num,
        host_ids=(lambda name: name) if transport == "tcp" else (lambda name: "here"),
        prefill_engine=lambda: next(prefill),
        decode_engine=lambda: next(decode),
        decode=decode_config,
        num_home_blocks=NUM_HOME_BLOCKS,
    )

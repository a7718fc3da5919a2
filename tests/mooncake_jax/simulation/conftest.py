"""Costs of round numbers, and small random workloads."""

import random

import pytest

from mooncake_jax.cost_model import CostModelFile, NodeCosts
from mooncake_jax.simulation import Workload
from mooncake_jax.trace import BLOCK_TOKENS


def made_up_costs(**changes) -> NodeCosts:
    values = {
        "kv_nbytes_per_token": 1000.0,
        "prefill_base_seconds": 0.1,
        "prefill_seconds_per_token": 1e-4,
        "prefill_seconds_per_pair": 1e-9,
        "prefill_seconds_per_prefix_token": 0.0,
        "load_nbytes_per_second": 1e9,
        "ssd_nbytes_per_second": 1e8,
        "nic_nbytes_per_second": 1e8,
        "transfer_base_seconds": 0.0,
        "scheduling_seconds": 0.0,
        "decode_base_seconds": 0.02,
        "decode_seconds_per_extra_request": 0.003,
        "decode_seconds_per_kv_token": 1e-7,
        "dram_nbytes": 1e9,
        "hbm_kv_nbytes": 1e9,
    }
    return NodeCosts(**{**values, **changes})


def random_workload(num: int, seed: int, *, seconds: float = 20.0, max_tokens: int = 20_000) -> Workload:
    """Prompts that share beginnings: a few stems, each continued by some."""
    rng = random.Random(seed)
    stems = [[1000 * stem + block for block in range(40)] for stem in range(4)]
    lengths = [rng.randint(1, max_tokens) for _ in range(num)]
    chains = []
    for request, length in enumerate(lengths):
        num_blocks = length // BLOCK_TOKENS
        shared = rng.choice(stems)[: rng.randint(0, num_blocks)]
        chains.append(
            [*shared, *(10_000 + 100 * request + block for block in range(num_blocks - len(shared)))]
        )
    return Workload(
        "random",
        sorted(rng.uniform(0.0, seconds) for _ in range(num)),
        lengths,
        [rng.choice([1, 2, 3, 10, 57, 200]) for _ in range(num)],
        chains,
    )


@pytest.fixture(scope="session")
def a800() -> NodeCosts:
    return CostModelFile.load("a800_llama3_70b").costs


@pytest.fixture
def costs() -> NodeCosts:
    return made_up_costs()


@pytest.fixture
def make_costs():
    return made_up_costs


@pytest.fixture
def make_workload():
    return random_workload

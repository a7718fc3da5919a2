"""What a simulated cluster consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mooncake_jax.conductor.policy import POLICIES, PolicyName
from mooncake_jax.cost_model import NodeCosts
from mooncake_jax.messages import Role
from mooncake_jax.simulation.caches import EvictionName
from mooncake_jax.simulation.discipline import DisciplineName
from mooncake_jax.trace import BLOCK_TOKENS

CoupledMode = Literal["plain", "prefix_caching", "chunked_prefill"]
FirstToken = Literal["loaded", "prefilled"]
Dispatch = Literal["fewest", "round_robin", "random"]


@dataclass(frozen=True)
class Failure:
    """A node dies."""

    at_seconds: float
    role: Role
    number: int


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A disaggregated cluster: prefill instances, decode nodes, a Conductor."""

    num_prefill: int
    num_decode: int
    costs: NodeCosts
    policy: PolicyName = "global"
    balancing_threshold: float = 2.0
    ttft_slo_seconds: float = 0.0  # of admission; 0: nothing is refused
    tbt_slo_seconds: float = 0.0
    reuse: bool = True  # False: no cache at all, every prompt is computed
    discipline: DisciplineName = "batch"
    tile_tokens: int = 2048  # of the discipline `tiles`
    nodes_per_group: int = 1  # of a prefill instance; more: chunked pipeline parallelism
    chunk_tokens: int = 4096  # of the pipeline
    block_tokens: int = BLOCK_TOKENS  # of a block of the workload's chains
    first_token: FirstToken = (
        "loaded"  # it is out when decode has its KV, as the paper counts, or after prefill
    )
    dram_tokens: int | None = None  # for blocks, a node; None: as the cost model says
    ssd_tokens: int = 0  # beside it
    eviction: EvictionName = "lru"
    nic_nbytes_per_second: float | None = None  # a node, each way; None: as the cost model says
    decode_slots: int = 256
    failures: tuple[Failure, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_prefill",
            "num_decode",
            "nodes_per_group",
            "chunk_tokens",
            "tile_tokens",
            "decode_slots",
            "block_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: expected one of {sorted(POLICIES)}")
        for failure in self.failures:
            num = self.num_prefill if failure.role == "prefill" else self.num_decode
            if not 0 <= failure.number < num:
                raise ValueError(f"failure of {failure.role} {failure.number}: there are {num}")

    @property
    def num_nodes(self) -> int:
        return self.num_prefill * self.nodes_per_group + self.num_decode


@dataclass(frozen=True, kw_only=True)
class CoupledConfig:
    """Nodes that do prefill and decode both, as vLLM 0.5 does."""

    num_nodes: int
    costs: NodeCosts
    mode: CoupledMode = "plain"
    dispatch: Dispatch = "fewest"  # requests outstanding
    batched_tokens: int = 131_072  # of a prefill pass; one prompt is taken whatever its length
    chunk_tokens: int = 2048  # of a step with `chunked_prefill`, decode tokens included
    num_slots: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_nodes", "batched_tokens", "chunk_tokens", "num_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.chunk_tokens <= self.num_slots:
            raise ValueError(
                f"chunk_tokens {self.chunk_tokens} must exceed num_slots {self.num_slots}: "
                "a full batch would leave no room for a prompt"
            )

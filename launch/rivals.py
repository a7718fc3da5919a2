"""Chunked pipeline, tensor and sequence parallelism over X nodes, like for like: what crosses, bubbles, TTFT.

A mesh device stands for a node here. What crosses is counted in the compiled step of each (`models.collectives`), at
the model's real width; times are modelled from a node's costs (`mooncake_jax.cost_model`), never measured.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models import lowering, ticks
from models.collectives import collectives
from models.config import LlamaConfig
from models.platform import ACCELERATOR
from models.sharding import MeshShape
from models.ticks import Chunk
from mooncake_jax.cost_model import NodeCosts

Kind = Literal["CPP", "TP", "SP"]
KINDS: tuple[Kind, ...] = ("CPP", "TP", "SP")
WIRE_NBYTES = 2  # activations and KV cross in bfloat16
_COUNTED_TOKENS = 1024  # of the chunk that is compiled; what crosses is in proportion


@dataclass(frozen=True)
class Crossing:
    """What one node takes part in and sends for a chunk, per layer that it computes."""

    kind: Kind
    num_nodes: int
    collectives_per_layer: float
    nbytes_per_token_and_layer: float

    def layers_here(self, cfg: LlamaConfig) -> float:
        """Layers that one node computes."""
        return cfg.num_layers / self.num_nodes if self.kind == "CPP" else cfg.num_layers


def crossing(cfg: LlamaConfig, kind: Kind, num_nodes: int, devices: Sequence[object]) -> Crossing:
    """Counted in the program that XLA makes for one layer (CPP: one of X stages of one layer) of this width.

    Raises ValueError for heads that do not divide.
    """
    if num_nodes == 1:
        return Crossing(kind, 1, 0.0, 0.0)
    layers = num_nodes if kind == "CPP" else 1
    one = dataclasses.replace(cfg, num_layers=layers, layers_per_group=1)
    sizes = {"dtype": "float32", "chunk_tokens": _COUNTED_TOKENS, "max_tokens": _COUNTED_TOKENS}
    if kind == "SP":
        step = lowering.prefill_by_rows(one, ACCELERATOR, list(devices[:num_nodes]), **sizes)
    else:
        shape = MeshShape(stage=num_nodes) if kind == "CPP" else MeshShape(tensor=num_nodes)
        step = lowering.prefill_tick(one, ACCELERATOR, shape.make(devices), num_slots=1, **sizes)
    found = collectives(step.jitted().lower(*step.args).compile().as_text())
    share = num_nodes / cfg.num_layers if kind == "CPP" else 1.0  # a stage passes on after all its layers
    sent = sum(one.sent_elements for one in found) * WIRE_NBYTES / _COUNTED_TOKENS
    return Crossing(kind, num_nodes, len(found) * share, sent * share)


@dataclass(frozen=True)
class Outcome:
    """Of one prompt, alone, with nothing cached. Modelled, but for bubbles, which are counted."""

    kind: Kind
    num_nodes: int
    prompt_tokens: int
    chunk_tokens: int
    balanced: bool
    ttft_seconds: float
    bubble_fraction: float
    sent_gigabytes: float  # by one node
    collectives: int
    mfu: float


def compute_seconds(costs: NodeCosts, chunk: Chunk) -> float:
    """All layers of a chunk on one node."""
    return costs.prefill_seconds(chunk.stop, chunk.start) - costs.prefill_base_seconds


def flops(cfg: LlamaConfig, num_tokens: int) -> float:
    """Of a prompt: two per weight of the layers and token, and the causal half of attention."""
    N, K, H = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    weights = cfg.d_model * (2 * N + 2 * K) * H + 3 * cfg.d_model * cfg.d_ff
    attention = 2 * N * H * num_tokens
    return cfg.num_layers * num_tokens * (2.0 * weights + attention)


def outcome(
    cfg: LlamaConfig,
    costs: NodeCosts,
    crossing: Crossing,
    prompt_tokens: int,
    chunk_tokens: int,
    node_flops_per_second: float,
    *,
    balanced: bool = False,
) -> Outcome:
    """Nodes compute in proportion to their share; TP and SP wait for what crosses, CPP passes it on behind the next
    chunk's compute (`models.ticks.finish_seconds`)."""
    X, nic = crossing.num_nodes, costs.nic_nbytes_per_second
    chunks = ticks.cut(0, 0, 0, prompt_tokens, chunk_tokens)
    if balanced:
        share = costs.prefill_seconds_per_pair / costs.prefill_seconds_per_token
        chunks = ticks.cut_balanced(
            0, 0, 0, prompt_tokens, len(chunks), attention_share=share, multiple=cfg.block_tokens
        )
    sent_per_token = crossing.nbytes_per_token_and_layer * crossing.layers_here(cfg)
    if crossing.kind == "CPP":
        seconds = ticks.finish_seconds(
            chunks,
            X,
            lambda chunk: compute_seconds(costs, chunk) / X,
            lambda chunk: chunk.num_tokens * sent_per_token / nic,
        )[-1]
        bubbles = ticks.occupancy(ticks.stream(chunks, X)).bubble_fraction
    else:
        seconds = sum(compute_seconds(costs, c) for c in chunks) / X + prompt_tokens * sent_per_token / nic
        bubbles = 0.0
    ttft = costs.prefill_base_seconds + seconds
    return Outcome(
        crossing.kind,
        X,
        prompt_tokens,
        chunk_tokens,
        balanced,
        ttft,
        bubbles,
        prompt_tokens * sent_per_token / 1e9,
        round(crossing.collectives_per_layer * crossing.layers_here(cfg) * len(chunks)),
        flops(cfg, prompt_tokens) / (ttft * X * node_flops_per_second),
    )


def queue_bubbles(prompts: Sequence[int], chunk_tokens: int, num_stages: int, *, drained: bool) -> float:
    """Counted bubbles of prompts that were queued together; `drained`: the pipeline empties after each of them."""
    each = [ticks.cut(i, 0, 0, n, chunk_tokens) for i, n in enumerate(prompts)]
    queues = each if drained else [[chunk for chunks in each for chunk in chunks]]
    ran = [tick for chunks in queues for tick in ticks.stream(chunks, num_stages)]
    return ticks.occupancy(ran).bubble_fraction


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    head = "| prompt | X | | chunk | TTFT s | MFU | bubbles | GB sent by a node | collectives |"
    rows = [
        f"| {o.prompt_tokens // 1024} k | {o.num_nodes} | {o.kind}{' balanced' if o.balanced else ''} | {o.chunk_tokens} "
        f"| {o.ttft_seconds:.2f} | {o.mfu:.0%} | {o.bubble_fraction:.1%} | {o.sent_gigabytes:.2f} | {o.collectives} |"
        for o in outcomes
    ]
    return "\n".join([head, "|--:|--:|---|--:|--:|--:|--:|--:|--:|", *rows])


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in dataclasses.fields(Outcome)])
        writer.writerows(dataclasses.astuple(one) for one in outcomes)

"""Decisions of a running Conductor over emulated nodes, taken again by the simulator from arrivals and completions.

Claim: the simulator's view of a cluster, which it rebuilds itself, leads to the decision that the Conductor took from
heartbeats, announcements and measured links in at least 95 % of the requests; every difference is explained. One decode
instance: between several, the pace that heartbeats report decides, which arrivals and completions do not tell.

    python -m launch.experiment --config=emulated_decisions          # about 4 minutes
"""

from __future__ import annotations

from pathlib import Path

from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Figure
from launch.local_cluster import ClusterConfig
from launch.replaying.prompts import Scale, lines
from launch.replaying.recorded import compare, record
from launch.replaying.recorded import figure as compared
from mooncake_jax.trace import BLOCK_TOKENS

TITLE = "Decisions on 3P1D emulated A800 nodes, decided again by the simulator, conversation trace"
TRACES = ("conversation",)
NUM_PREFILL, NUM_DECODE = 3, 1
NUM_REQUESTS = 150
SPEED = 0.35  # three prefill nodes get the load of three in eight
MAX_TOKENS = 60_000
DRAM_NBYTES = 512 << 20
RUN_DIR = Path("run/emulated_decisions")


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    trace = lab.trace("conversation").head(NUM_REQUESTS)
    sent, _ = lines(trace, Scale(speed=SPEED, output_share=0.3, max_tokens=MAX_TOKENS))
    cluster = ClusterConfig(
        model="preset:tiny",
        run_dir=RUN_DIR,
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        num_stores=0,
        max_tokens=MAX_TOKENS,
        dram_nbytes=DRAM_NBYTES,
        prefill_host_ids=tuple(f"host-{i}" for i in range(NUM_PREFILL)),
        decode_host_ids=tuple(f"host-{NUM_PREFILL + i}" for i in range(NUM_DECODE)),
        engine_flags=("--engine=emulated", f"--cost_model={lab.file.name}", f"--block_tokens={BLOCK_TOKENS}"),
        conductor_flags=(f"--cost_model={lab.file.name}",),
    )
    recording = record(cluster, sent)
    recording.write(RUN_DIR / "recording.jsonl")
    return compared(TITLE, "emulated", compare(recording))

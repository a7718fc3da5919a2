"""Decisions of a running Conductor over two real prefill processes, taken again by the simulator: SmolLM2-135M.

Claim: as `emulated_decisions`, where nothing is modelled: real times, real queues, a node's DRAM that holds a part of the
blocks only. Blocks of the conversation trace are shrunk from 512 tokens to 32, answers are of one token.

    python -m launch.experiment --config=real_decisions          # about 4 minutes on 2 cores
"""

from __future__ import annotations

from pathlib import Path

from launch.cluster import default_compile_cache
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Figure
from launch.local_cluster import ClusterConfig
from launch.model_cache import smollm2_checkpoint
from launch.replaying.prompts import Scale, lines
from launch.replaying.recorded import compare, record
from launch.replaying.recorded import figure as compared

TITLE = "Decisions on 2 real prefill processes, decided again by the simulator, SmolLM2-135M on a CPU"
TRACES = ("conversation",)
NUM_REQUESTS = 150
BLOCK_TOKENS = 32
SPEED = 0.5
MAX_TOKENS = 4096
DRAM_NBYTES = 256 << 20
RUN_DIR = Path("run/real_decisions")


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    trace = lab.trace("conversation").head(NUM_REQUESTS)
    scale = Scale(block_tokens=BLOCK_TOKENS, output_share=0.0, speed=SPEED, max_tokens=MAX_TOKENS)
    sent, _ = lines(trace, scale)
    cluster = ClusterConfig(
        model=str(smollm2_checkpoint("bfloat16")),
        run_dir=RUN_DIR,
        num_prefill=2,
        num_decode=1,
        num_stores=0,
        max_tokens=MAX_TOKENS,
        dram_nbytes=DRAM_NBYTES,
        compile_cache=default_compile_cache(),
        pin=True,
    )
    recording = record(cluster, sent)
    recording.write(RUN_DIR / "recording.jsonl")
    return compared(TITLE, "measured", compare(recording))

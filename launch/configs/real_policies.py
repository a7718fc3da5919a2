"""Policies on two real prefill processes of this machine: SmolLM2-135M, a core each, answers of one token.

Claim: `global` is ahead of `load` and of `random` with the 95 % interval of the paired difference clear of 0, and at most
5 % behind `local`. The first requests of the conversation trace, every block of 512 tokens made one of 32 and all lengths
shrunk alike: who shares which prefix stays as it is. The nodes' DRAM holds a part of the blocks only.

    python -m launch.experiment --config=real_policies --requests=150       # about 40 minutes on 2 cores
"""

from __future__ import annotations

from pathlib import Path

from launch.cluster import default_compile_cache
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Figure
from launch.local_cluster import ClusterConfig
from launch.model_cache import smollm2_checkpoint
from launch.replaying.policies import Study
from launch.replaying.policies import figure as compared
from launch.replaying.prompts import Scale

TITLE = "Policies on 2 real prefill processes, SmolLM2-135M, conversation trace scaled down"
TRACES = ("conversation",)
POLICIES = ("global", "local", "load", "random")
NUM_SEEDS = 5
BLOCK_TOKENS = 32
SPEED = 0.5
MAX_TOKENS = 4096
DRAM_NBYTES = 256 << 20


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    study = Study(
        cluster=ClusterConfig(
            model=str(smollm2_checkpoint("bfloat16")),
            run_dir=Path("run/real_policies"),
            num_prefill=2,
            num_decode=1,
            num_stores=0,
            max_tokens=MAX_TOKENS,
            dram_nbytes=DRAM_NBYTES,
            compile_cache=default_compile_cache(),
            pin=True,
        ),
        scale=Scale(block_tokens=BLOCK_TOKENS, output_share=0.0, speed=SPEED, max_tokens=MAX_TOKENS),
        policies=POLICIES,
        num_seeds=NUM_SEEDS,
        trace=lab.trace("conversation"),
    )
    outcomes = study.run(lab.progress.update if lab.progress is not None else lambda: None)
    return compared(TITLE, "measured", outcomes, ())

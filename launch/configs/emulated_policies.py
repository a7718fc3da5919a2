"""Policies on emulated nodes: 8 prefill and 8 decode instances, modelled A800 times, real bytes, the real Conductor.

Claim (Figure 5): cache-aware scheduling is ahead of load balancing and of chance. The paper has the values of 16 real
nodes; here every role is a process of this machine that takes the time of the cost model, and `preset:tiny` gives the
bytes of a token. The conversation trace's first ten minutes with its own arrival times, in 90 seconds: a modelled second
takes 0.15 s. Answers have one token, so that the few cores of this machine carry the load: this compares prefill.

    python -m launch.experiment --config=emulated_policies --results=docs/emulated_policies.md   # 12 minutes, 2 quiet cores
"""

from __future__ import annotations

from pathlib import Path

from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Figure
from launch.local_cluster import ClusterConfig
from launch.replaying.policies import Study
from launch.replaying.policies import figure as compared
from launch.replaying.prompts import Scale, lines

TITLE = "Policies on 8P8D emulated A800 nodes, conversation trace"
TRACES = ("conversation",)
POLICIES = ("global", "global_cost", "local", "load", "load_seconds", "random")
SECONDS = 600.0  # of the trace
TIME_SCALE = 0.15
NUM_PREFILL = NUM_DECODE = 8
MAX_TOKENS = 140_000
DRAM_NBYTES = 256 << 20


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    trace = lab.trace("conversation")
    num = sum(request.timestamp <= 1000.0 * SECONDS for request in trace.requests)
    sent, num_too_long = lines(
        trace.head(num), Scale(output_share=0.0, speed=1.0 / TIME_SCALE, max_tokens=MAX_TOKENS)
    )
    times = (f"--cost_model={lab.file.name}", f"--time_scale={TIME_SCALE}")
    study = Study(
        cluster=ClusterConfig(
            model="preset:tiny",
            run_dir=Path("run/emulated_policies"),
            num_prefill=NUM_PREFILL,
            num_decode=NUM_DECODE,
            num_stores=0,
            max_tokens=MAX_TOKENS,
            dram_nbytes=DRAM_NBYTES,
            staging_nbytes=64 << 20,
            prefill_host_ids=tuple(f"host-{i}" for i in range(NUM_PREFILL)),
            decode_host_ids=tuple(f"host-{NUM_PREFILL + i}" for i in range(NUM_DECODE)),
            engine_flags=("--engine=emulated", *times, "--block_tokens=512"),
            conductor_flags=times,
        ),
        policies=POLICIES,
        arrivals=[sent],
    )
    notes = (
        "Emulated: engines compute nothing and take modelled time. TTFT is in real seconds, "
        f"{TIME_SCALE} of the model's; transfers and everything but computing take the real time of this machine. "
        f"{len(sent)} requests, {num_too_long} longer than {MAX_TOKENS} tokens left out.",
    )
    outcomes = study.run(lab.progress.update if lab.progress is not None else lambda: None)
    return compared(TITLE, "emulated", outcomes, notes)

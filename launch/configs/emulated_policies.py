"""Policies on emulated nodes: 8 prefill and 8 decode instances, modelled A800 times, real bytes, the real Conductor.

Claim (Figure 5): cache-aware scheduling is ahead of load balancing and of chance. The paper has the values of 16 real
nodes; here every role is a process of this machine that takes the time of the cost model, and `preset:tiny` gives the
bytes of a token. Half the real pace of the conversation trace's first ten minutes: a second of the model takes two.

    python -m launch.experiment --config=emulated_policies --requests=400       # about 2 hours on 8 cores
"""

from __future__ import annotations

from pathlib import Path

from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Figure
from launch.local_cluster import ClusterConfig
from launch.replaying.policies import Study
from launch.replaying.policies import figure as compared
from launch.replaying.prompts import Scale

TITLE = "Policies on 8P8D emulated A800 nodes, conversation trace"
TRACES = ("conversation",)
POLICIES = ("global", "global_cost", "local", "load", "load_seconds", "random")
SECONDS = 600.0  # of the trace
TIME_SCALE = 2.0
NUM_PREFILL = NUM_DECODE = 8


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    trace = lab.trace("conversation")
    num = sum(request.timestamp <= 1000.0 * SECONDS for request in trace.requests)
    study = Study(
        cluster=ClusterConfig(
            model="preset:tiny",
            run_dir=Path("run/emulated_policies"),
            num_prefill=NUM_PREFILL,
            num_decode=NUM_DECODE,
            num_stores=0,
            max_tokens=140_000,
            prefill_host_ids=tuple(f"host-{i}" for i in range(NUM_PREFILL)),
            decode_host_ids=tuple(f"host-{NUM_PREFILL + i}" for i in range(NUM_DECODE)),
            engine_flags=(
                "--engine=emulated",
                f"--cost_model={lab.file.name}",
                f"--time_scale={TIME_SCALE}",
                "--block_tokens=512",
            ),
            conductor_flags=(f"--cost_model={lab.file.name}", f"--time_scale={TIME_SCALE}"),
        ),
        scale=Scale(speed=1.0 / TIME_SCALE, max_tokens=140_000),
        policies=POLICIES,
        num_seeds=1,
        trace=trace.head(num),
    )
    notes = (
        "Emulated: engines compute nothing and take modelled time. TTFT is in real seconds, twice the model's.",
    )
    return compared(
        TITLE, "emulated", study.run(lab.progress.update if lab.progress is not None else lambda: None), notes
    )

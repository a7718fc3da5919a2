"""Policies on two real prefill processes of this machine: SmolLM2-135M, a core each, answers of one token.

Claim: `global` is ahead of `load` and of `random` with the 95 % interval of the paired difference clear of 0, and at most 5
% behind `local`. The conversation trace scaled down: one conversation in 64, whole (of all 177 such requests 36.6 % of the
blocks are repeated, as in the whole trace; of those sent about 31 %), the first 110 requests of these; every block of 512
tokens is one of 32, and lengths shrink alike, so who shares which prefix stays as it is. Arrivals are drawn evenly, once
per seed, over the time in which two instances that reuse nothing would be busy to 70 %, by the profile of this machine. The
nodes' DRAM holds about half of the blocks. The Conductors forecast with the profile in `run/real_policies/cost.json`, which
is measured first if it is not there.

    python -m launch.experiment --config=real_policies --results=docs/real_policies.md    # 12 minutes on 2 quiet cores
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch.cluster import default_compile_cache
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Figure
from launch.local_cluster import ClusterConfig
from launch.model_cache import smollm2_checkpoint
from launch.process import UsageError
from launch.replaying.policies import Study, drawn_arrivals
from launch.replaying.policies import figure as compared
from launch.replaying.prompts import Scale, lines
from mooncake_jax.cost_model import CostModelFile

TITLE = "Policies on 2 real prefill processes, SmolLM2-135M, conversation trace scaled down"
TRACES = ("conversation",)
POLICIES = ("global", "local", "load", "random")
NUM_SEEDS = 5
ONE_IN = 64  # conversations
NUM_REQUESTS = 110
BLOCK_TOKENS = 32
LOAD = 0.7  # of what the instances could compute without any reuse
MAX_TOKENS = 4096
DRAM_NBYTES = 256 << 20
RUN_DIR = Path("run/real_policies")
NUM_PREFILL = 2


def profile(model: str, run_dir: Path) -> CostModelFile:
    """Of one core of this machine; kept in the run's folder. Raises UsageError."""
    path = run_dir / "cost.json"
    if not path.is_file():
        argv = ["-m", "launch.profile", f"--model={model}", f"--out={path}", f"--max_tokens={MAX_TOKENS}"]
        argv += [f"--longest={MAX_TOKENS}", "--cores=0", "--lengths=5", "--repeats=3", "--held_out=6"]
        if subprocess.run([sys.executable, *argv], check=False).returncode:
            raise UsageError(f"python {' '.join(argv)} failed; its last lines are above")
    return CostModelFile.load(path)


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    model = str(smollm2_checkpoint("bfloat16"))
    cost = profile(model, RUN_DIR)
    scale = Scale(block_tokens=BLOCK_TOKENS, output_share=0.0, max_tokens=MAX_TOKENS)
    sent, num_too_long = lines(lab.trace("conversation").thinned(ONE_IN), scale)
    sent = sent[:NUM_REQUESTS]
    cold = sum(float(cost.costs.prefill_seconds(float(len(line.tokens)), 0.0)) for line in sent)
    span = cold / (NUM_PREFILL * LOAD)
    study = Study(
        cluster=ClusterConfig(
            model=model,
            run_dir=RUN_DIR,
            num_prefill=NUM_PREFILL,
            num_decode=1,
            num_stores=0,
            max_tokens=MAX_TOKENS,
            dram_nbytes=DRAM_NBYTES,
            staging_nbytes=64 << 20,
            compile_cache=default_compile_cache(),
            pin=True,
            conductor_flags=(f"--cost_model={RUN_DIR / 'cost.json'}",),
        ),
        policies=POLICIES,
        arrivals=[drawn_arrivals(sent, seed, span) for seed in range(NUM_SEEDS)],
    )
    outcomes = study.run(lab.progress.update if lab.progress is not None else lambda: None)
    notes = (
        f"{len(sent)} requests over {span:.1f} s a run, {NUM_SEEDS} arrival seeds; {num_too_long} lines of the thinned "
        f"trace are longer than {MAX_TOKENS} tokens and left out. {cost.description}",
    )
    return compared(TITLE, "measured", outcomes, notes)

"""A cost model measured here predicts another real run here: mean TTFT within 15 %, SmolLM2-135M on a CPU.

Claim: what `launch.profile` measures in a process of its own, on random prompts, tells the simulator the mean TTFT of a
trace that other processes serve; the time between tokens is printed beside it. One prefill and one decode process with
a core each; blocks of the conversation trace shrunk from 512 tokens to 32, all lengths alike.

    python -m launch.experiment --config=calibration          # about 7 minutes on 2 cores
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvstore.errors import InvalidError
from launch.cluster import default_compile_cache
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Panel, Series, Values, rows_of, within
from launch.local_cluster import ClusterConfig, core_sets
from launch.model_cache import smollm2_checkpoint
from launch.replaying.outcome import Outcome
from launch.replaying.prompts import Line, Scale, lines
from launch.replaying.recorded import block_chains, serve
from mooncake_jax.cost_model import CostModelFile
from mooncake_jax.simulation import ClusterConfig as SimulatedConfig
from mooncake_jax.simulation import Outcomes, Workload, simulate
from mooncake_jax.trace import Trace

TITLE = "A measured cost model against a real run, 2-core CPU, SmolLM2-135M"
TRACES = ("conversation",)
FIRST, NUM_REQUESTS = 2000, 80  # of the trace
SCALE = Scale(block_tokens=32, speed=0.3, max_tokens=2048)
DRAM_NBYTES = 1 << 30
DECODE_SLOTS = 8
TILE_TOKENS = 512  # of prefill on a CPU
RUN_DIR = Path("run/calibration")
PROFILE_FLAGS = ("--lengths=5", "--repeats=3", "--held_out=8", "--longest=2048")

EXPECTED = [
    Expected("mean TTFT: simulated beside measured", "ttft", 0.0, within(0.15), "s"),
    Expected("p90 TTFT: simulated beside measured", "p90", 0.0, REPORT, "s"),
    Expected("mean time between tokens: simulated beside measured", "tbt", 0.0, REPORT, "ms"),
    Expected("prompt tokens reused: simulated beside measured", "reused", 0.0, REPORT, "%"),
    Expected("every request was answered", "all", math.nan, HOLDS),
]


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    trace = lab.trace("conversation")
    part = Trace(trace.name, trace.requests[FIRST : FIRST + NUM_REQUESTS])
    if not part.requests:
        raise InvalidError(f"calibration: the trace has {len(trace)} requests, {FIRST} and more are needed")
    sent, _ = lines(part, SCALE)
    file = profiled()
    outcomes, _, _ = serve(cluster(), sent)
    told = predicted(file, sent)
    measured, simulated = _values(outcomes), _simulated(told)
    expected = [one._replace(paper=measured.get(one.key, one.paper)) for one in EXPECTED]
    order = np.argsort([line.at_seconds for line in sent], kind="stable")
    ok = {outcome.index: outcome.ttft_seconds for outcome in outcomes}
    times = [sent[i].at_seconds for i in order]
    panel = Panel(
        "TTFT",
        "arrival (s)",
        "s",
        [
            Series("simulated", times, told.ttft_seconds[order].tolist(), "simulated"),
            Series("measured", times, [ok[sent[i].index] for i in order], "measured"),
        ],
    )
    notes = (
        "The column 'paper' is what was measured here; 'ours' is what the simulator said, with the cost model of "
        f"another process on other prompts: {file.description}",
    )
    return Figure(TITLE, "measured", rows_of(expected, simulated | {"all": measured["all"]}), [panel], notes)


def cluster() -> ClusterConfig:
    return ClusterConfig(
        model=str(smollm2_checkpoint("bfloat16")),
        run_dir=RUN_DIR,
        num_prefill=1,
        num_decode=1,
        num_stores=0,
        prefill_host_ids=("host-0",),
        max_tokens=SCALE.max_tokens,
        decode_slots=DECODE_SLOTS,
        dram_nbytes=DRAM_NBYTES,
        compile_cache=default_compile_cache(),
        pin=True,
    )


def profiled() -> CostModelFile:
    """Measured by `launch.profile` with the core that prefill will have. Raises InvalidError when it fails."""
    path = RUN_DIR / "cost.json"
    core = core_sets(sorted(os.sched_getaffinity(0)), 2)[0][0]
    command = [
        *(sys.executable, "-m", "launch.profile", f"--out={path}", f"--cores={core}"),
        *(f"--dram_bytes={DRAM_NBYTES}", f"--decode_slots={DECODE_SLOTS}"),
        *(f"--max_tokens={SCALE.max_tokens}", *PROFILE_FLAGS),
    ]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if ended.returncode:
        raise InvalidError(f"launch.profile ended with {ended.returncode}: {' '.join(command)}")
    return CostModelFile.load(path)


def predicted(file: CostModelFile, sent: list[Line]) -> Outcomes:
    """What the simulator says of the same requests."""
    chains = block_chains(sent, SCALE.block_tokens)
    workload = Workload(
        "calibration",
        [line.at_seconds for line in sent],
        [len(line.tokens) for line in sent],
        [line.max_tokens for line in sent],
        [chains[line.index] for line in sent],
    )
    config = SimulatedConfig(
        num_prefill=1,
        num_decode=1,
        costs=file.costs,
        discipline="tiles",
        tile_tokens=TILE_TOKENS,
        block_tokens=SCALE.block_tokens,
        first_token="prefilled",
        decode_slots=DECODE_SLOTS,
    )
    return simulate(config, workload)


def _values(outcomes: list[Outcome]) -> Values:
    done = [one for one in outcomes if one.status == "ok"]
    ttft = [one.ttft_seconds for one in done]
    return {
        "ttft": float(np.mean(ttft)),
        "p90": float(np.quantile(ttft, 0.9)),
        "tbt": 1000 * float(np.mean([one.mean_tbt_seconds for one in done if one.mean_tbt_seconds >= 0.0])),
        "reused": 100.0 * sum(one.cached_tokens for one in done) / sum(one.prompt_tokens for one in done),
        "all": float(len(done) == len(outcomes)),
    }


def _simulated(told: Outcomes) -> Values:
    several = told.mean_tbt_seconds > 0.0
    return {
        "ttft": told.mean_ttft_seconds,
        "p90": float(np.quantile(told.ttft_seconds, 0.9)),
        "tbt": 1000 * float(np.mean(told.mean_tbt_seconds[several])),
        "reused": 100.0 * told.hit_rate,
    }

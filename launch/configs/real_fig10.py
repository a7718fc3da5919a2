"""Figure 10 on this machine: caches of three prefill processes, shared by the store or each for itself, SmolLM2-135M.

Claim: with one store over all processes more of the prompts is reused, and less prefill time is spent, than when each
process sees its own blocks only (2.22 times and 0.76 times in the paper, 10 nodes, conversation trace). `global`
fetches what another process has; `local` prefers the process that has it; `random` ignores the caches.

    python -m launch.experiment --config=real_fig10          # about 7 minutes on 2 cores
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from launch.cluster import default_compile_cache
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Panel, Series, Values, rows_of
from launch.local_cluster import ClusterConfig
from launch.model_cache import smollm2_checkpoint
from launch.replaying.prompts import Line, Scale, lines
from launch.replaying.recorded import serve
from mooncake_jax.conductor.decision_log import EndRecord

TITLE = "Figure 10 measured on a 2-core CPU, SmolLM2-135M, conversation trace scaled down"
TRACES = ("conversation",)
POLICIES = ("global", "local", "random")
NUM_PREFILL = 3
NUM_REQUESTS = 150
SCALE = Scale(block_tokens=32, output_share=0.0, speed=0.5, max_tokens=2048)
DRAM_NBYTES = 256 << 20
RUN_DIR = Path("run/real_fig10")
NOTES = (
    "The same requests at the same times, one policy after the other, each on a cluster with empty caches; answers of one "
    "token. Three prefill processes and one for decode take turns on two cores, and their clocks run while others "
    "compute: prefill seconds compare with each other, not with a machine of four cores.",
)

EXPECTED = [
    *(Expected(f"tokens reused, {policy}", f"reused {policy}", math.nan, REPORT, "%") for policy in POLICIES),
    *(
        Expected(f"prefill seconds of a request, {policy}", f"prefill {policy}", math.nan, REPORT, "s")
        for policy in POLICIES
    ),
    *(Expected(f"mean TTFT, {policy}", f"ttft {policy}", math.nan, REPORT, "s") for policy in POLICIES),
    Expected("tokens reused, global / local", "reused ratio", 2.22, REPORT),
    Expected("prefill time, global / local", "prefill ratio", 0.76, REPORT),
    Expected("global reuses at least as much as local, and both more than random", "order", math.nan, HOLDS),
    Expected("every request was answered", "all", math.nan, HOLDS),
]


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    sent, _ = lines(lab.trace("conversation").head(NUM_REQUESTS), SCALE)
    values: Values = {"all": 1.0}
    for policy in POLICIES:
        values |= _served(policy, sent, values)
    values["reused ratio"] = values["reused global"] / max(values["reused local"], 1e-9)
    values["prefill ratio"] = values["prefill global"] / max(values["prefill local"], 1e-9)
    reused = [values[f"reused {policy}"] for policy in POLICIES]
    values["order"] = float(reused[0] >= reused[1] > reused[2])
    panels = [
        Panel(
            name,
            "policy",
            unit,
            [Series("measured", list(POLICIES), [values[f"{key} {p}"] for p in POLICIES], "measured")],
            bars=True,
        )
        for name, key, unit in (("tokens reused", "reused", "%"), ("prefill", "prefill", "s a request"))
    ]
    return Figure(TITLE, "measured", rows_of(EXPECTED, values), panels, NOTES)


def _served(policy: str, sent: list[Line], so_far: Values) -> Values:
    config = dataclasses.replace(cluster(), run_dir=RUN_DIR / policy, conductor_flags=(f"--policy={policy}",))
    outcomes, _, log = serve(config, sent)
    done = [one for one in outcomes if one.status == "ok"]
    ends = [record.end for record in log if isinstance(record, EndRecord)]
    seconds = [end.seconds for end in ends if end.phase == "prefill" and end.ok]
    prompt_tokens = sum(one.prompt_tokens for one in done)
    return {
        f"reused {policy}": 100.0 * sum(one.cached_tokens for one in done) / max(prompt_tokens, 1),
        f"prefill {policy}": sum(seconds) / max(len(seconds), 1),
        f"ttft {policy}": sum(one.ttft_seconds for one in done) / max(len(done), 1),
        "all": float(so_far["all"] == 1.0 and len(done) == len(sent)),
    }


def cluster() -> ClusterConfig:
    return ClusterConfig(
        model=str(smollm2_checkpoint("bfloat16")),
        run_dir=RUN_DIR,
        num_prefill=NUM_PREFILL,
        num_decode=1,
        num_stores=0,
        prefill_host_ids=tuple(f"host-{i}" for i in range(NUM_PREFILL)),  # they exchange KV over TCP
        max_tokens=SCALE.max_tokens,
        dram_nbytes=DRAM_NBYTES,
        compile_cache=default_compile_cache(),
        pin=True,
    )

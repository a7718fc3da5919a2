"""Five times the load that a real cluster can serve, for a minute: SmolLM2-135M, one prefill and one decode process.

Claim: at 5× at least 95 % of the accepted requests meet both SLOs, every 429 says when to come back, goodput is at least
0.9 of that at 1×, and the cluster has recovered 10 s after the load. 1× is the rate at which 90 % meet the SLOs, which are
four times the unloaded medians. Prompts of 256 tokens that share nothing, answers of 8 tokens, Poisson arrivals.

    python -m launch.experiment --config=overload --results=docs/overload.md     # 7 minutes on 2 quiet cores
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from launch.cluster import default_compile_cache
from launch.configs.real_policies import profile
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import Figure, Panel, Series
from launch.local_cluster import Cluster, ClusterConfig
from launch.model_cache import smollm2_checkpoint
from launch.replaying.outcome import Outcome
from launch.replaying.overload import Shape, fair_slo, find_rate, poisson, rows
from launch.replaying.prompts import Line
from launch.replaying.targets import ConductorTarget, replay

TITLE = "Overload of a real cluster, SmolLM2-135M, 1 prefill and 1 decode process"
TRACES = ()
SHAPE = Shape(256, 8, 40_000)
NUM_ALONE = 12
FIRST_RATE = 1.0
SEARCH_SECONDS, ONCE_SECONDS, LOAD_SECONDS, AFTER_SECONDS = 12.0, 40.0, 60.0, 20.0
TIMES = 5.0
RUN_DIR = Path("run/overload")


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    model = str(smollm2_checkpoint("bfloat16"))
    cost = profile(model, RUN_DIR)
    config = ClusterConfig(
        model=model,
        run_dir=RUN_DIR,
        num_prefill=1,
        num_decode=1,
        num_stores=0,
        max_tokens=1024,
        compile_cache=default_compile_cache(),
        pin=True,
        conductor_flags=(f"--cost_model={RUN_DIR / 'cost.json'}",),
        num_more_conductors=1,
    )
    rng = np.random.default_rng(0)

    def send(address: str, lines: list[Line]) -> list[Outcome]:
        outcomes = asyncio.run(replay(ConductorTarget(address), lines, lambda outcome: None))
        if lab.progress is not None:
            lab.progress.update()
        return outcomes

    with Cluster(config) as cluster:
        open_to_all = cluster.instances["conductor"]
        alone = [
            outcome
            for _ in range(NUM_ALONE)
            for outcome in send(open_to_all, poisson(1e3, 0.0, 1e-3, SHAPE, rng)[:1])
        ]
        slo = fair_slo(alone)
        rate = find_rate(
            lambda rate: send(open_to_all, poisson(rate, 0.0, SEARCH_SECONDS, SHAPE, rng)), slo, FIRST_RATE
        )
        strict = cluster.start_conductor(
            *config.conductor_flags,
            f"--ttft_slo_seconds={slo.ttft_seconds}",
            f"--tbt_slo_seconds={slo.tbt_seconds}",
        )
        once = send(strict, poisson(rate, 0.0, ONCE_SECONDS, SHAPE, rng))
        lines = poisson(TIMES * rate, 0.0, LOAD_SECONDS, SHAPE, rng)
        lines += poisson(rate / 2.0, LOAD_SECONDS, AFTER_SECONDS, SHAPE, rng)
        overload = send(strict, lines)
    answered = [one for one in overload if one.status == "ok"]
    curve = Series(
        "measured, answered",
        [one.at_seconds for one in answered],
        [one.ttft_seconds for one in answered],
        "measured",
    )
    return Figure(
        TITLE,
        "measured",
        rows(once, overload, slo, rate, LOAD_SECONDS),
        [Panel("TTFT under 5×, then 0.5×", "arrival, s", "s", [curve])],
        (f"The Conductor forecasts with a profile of this machine: {cost.description}",),
    )

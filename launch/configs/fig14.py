"""Figure 14: where the time of one request goes, prompts of 8 k to 128 k tokens, none or 95 % of them cached.

Claim: 95 % cached takes 92 % off the prefill and 86 % off the TTFT of a 128 k prompt; transfer and loading stay thin.
The prefill bars are what the cost model was fitted to: these rows check the fit, they are no evidence.

    python -m launch.experiment --config=fig14          # 1 s
"""

from __future__ import annotations

from launch.figures.assumptions import Assumptions, Chosen
from launch.figures.lab import Lab, simulated
from launch.figures.result import Expected, Figure, Panel, Series, Values, between, points, within
from mooncake_jax.simulation import Workload, simulate
from mooncake_jax.trace import BLOCK_TOKENS

TITLE = "Figure 14: latency of one request by part"
TRACES = ()
PROMPTS = (8, 16, 32, 64, 128)  # k tokens
PAPER = {0: (0.93, 1.98, 4.42, 10.6, 27.6), 95: (0.10, 0.23, 0.39, 0.86, 2.31)}
NUM_DECODED = 128
NOTES = ("The ten prefill bars are the cost model's calibration. Decode bars are read off as 3.5 to 4.5 s.",)


def _gate(cached: int, prompt: int) -> float:
    if cached == 0:
        return 0.10
    return 0.25 if prompt < 32 else 0.15


EXPECTED = [
    *(
        Expected(
            f"prefill of {prompt} k tokens, {cached} % cached (calibration)",
            f"prefill {cached} {prompt}",
            seconds,
            within(_gate(cached, prompt)),
            "s",
        )
        for cached, bars in PAPER.items()
        for prompt, seconds in zip(PROMPTS, bars, strict=True)
    ),
    Expected(
        f"decode of {NUM_DECODED} tokens after 8 k", "decode 8", 3.5, between(3.5 * 0.97, 4.5 * 1.03), "s"
    ),
    Expected(
        f"decode of {NUM_DECODED} tokens after 128 k", "decode 128", 4.5, between(3.5 * 0.97, 4.5 * 1.03), "s"
    ),
    Expected("prefill saved by 95 %, 128 k", "prefill saved", 92.0, points(5.0), "%"),
    Expected("TTFT saved by 95 %, 128 k", "ttft saved", 86.0, points(5.0), "%"),
]


def _ttft(lab: Lab, chosen: Chosen, num_tokens: int, cached: int) -> float:
    # the cached prompt came long before, the measured one comes alone
    num_blocks = num_tokens * cached // 100 // BLOCK_TOKENS
    chain = list(range(num_tokens // BLOCK_TOKENS))
    first = max(num_blocks, 1) * BLOCK_TOKENS
    workload = Workload(
        "alone",
        [0.0, 1000.0],
        [first, num_tokens],
        [1, 1],
        [chain[:num_blocks], chain],
    )
    return float(simulate(lab.cluster_config(chosen), workload).ttft_seconds[1])


def measure(lab: Lab, chosen: Chosen) -> Values:
    values: Values = {}
    for prompt in PROMPTS:
        num = prompt * 1024
        for cached in PAPER:
            values[f"prefill {cached} {prompt}"] = lab.costs.prefill_seconds(num, num * cached / 100)
        kv_tokens = num * NUM_DECODED + NUM_DECODED * (NUM_DECODED - 1) / 2
        values[f"decode {prompt}"] = (
            NUM_DECODED * lab.costs.step_seconds(1, 0) + lab.costs.decode_seconds_per_kv_token * kv_tokens
        )
    values["prefill saved"] = 100 * (1 - values["prefill 95 128"] / values["prefill 0 128"])
    whole, cached = (_ttft(lab, chosen, 128 * 1024, share) for share in PAPER)
    values["ttft saved"] = 100 * (1 - cached / whole)
    return values


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    values = measure(lab, assumptions.chosen)
    labels = [f"{prompt} k" for prompt in PROMPTS]
    panels = [
        Panel(
            f"{cached} % cached",
            "prompt",
            "s",
            [
                Series(
                    "prefill",
                    labels,
                    [values[f"prefill {cached} {prompt}"] for prompt in PROMPTS],
                    "simulated",
                ),
                Series("prefill", labels, bars, "paper"),
                Series(
                    f"decode, {NUM_DECODED} tokens",
                    labels,
                    [values[f"decode {p}"] for p in PROMPTS],
                    "simulated",
                ),
                Series("load", labels, [lab.costs.load_seconds(p * 1024.0) for p in PROMPTS], "simulated"),
                Series(
                    "transfer",
                    labels,
                    [lab.costs.kv_nbytes(p * 1024.0) / lab.costs.nic_nbytes_per_second for p in PROMPTS],
                    "simulated",
                ),
            ],
            bars=True,
        )
        for cached, bars in PAPER.items()
    ]
    return simulated(
        lab,
        assumptions,
        title=TITLE,
        measure=measure,
        expected=EXPECTED,
        panels=panels,
        varied=(),
        notes=NOTES,
    )

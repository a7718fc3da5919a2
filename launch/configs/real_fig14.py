"""Figure 14 on this machine: where the time of one request goes, none or 95 % of it cached, SmolLM2-135M on a CPU.

Claim: a prefix that is cached takes most of the prefill off the TTFT, the more the longer the prompt, and the KV's way to
decode stays hidden. Real engines, one prefill and one decode process with a core each; the paper's bars are of
LLaMA3-70B on A800 (92 % of the prefill and 86 % of the TTFT saved at 128 k tokens).

    python -m launch.experiment --config=real_fig14          # about 4 minutes on 2 cores
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from launch.cluster import default_compile_cache
from launch.figures.assumptions import Assumptions
from launch.figures.lab import Lab
from launch.figures.result import HOLDS, REPORT, Expected, Figure, Panel, Series, Values, rows_of
from launch.local_cluster import Cluster, ClusterConfig
from launch.model_cache import smollm2_checkpoint
from launch.replaying.parts import Parts, answered_one_by_one, median

TITLE = "Figure 14 measured on a 2-core CPU, SmolLM2-135M"
TRACES = ()
PROMPTS = (1000, 2000, 4000, 8000)  # tokens
CACHED = (0, 95)  # percent
NUM_DECODED = 32
NUM_REPEATS = 3
BLOCK_TOKENS = 32
PAUSE_SECONDS = 1.0  # until a prompt's blocks are announced
PARTS = ("scheduling", "prefill", "transfer_tail", "decode")
VOCABULARY = (1000, 40_000)
NOTES = (
    f"Medians of {NUM_REPEATS} prompts each, one at a time, {NUM_DECODED} tokens decoded. The first token leaves before "
    "decode has all KV; 'transfer tail' is how long that takes afterwards. Cached blocks are read where prefill's home "
    "node keeps them (one process pair on one host: nothing crosses a network).",
)

EXPECTED = [
    *(
        Expected(
            f"{part.replace('_', ' ')}, {length} tokens, {cached} % cached",
            f"{part} {length} {cached}",
            math.nan,
            REPORT,
            "s",
        )
        for cached in CACHED
        for length in PROMPTS
        for part in ("ttft", *PARTS)
    ),
    *(
        Expected(f"prefill saved by 95 %, {length} tokens", f"prefill saved {length}", math.nan, REPORT, "%")
        for length in PROMPTS
    ),
    *(
        Expected(f"TTFT saved by 95 %, {length} tokens", f"ttft saved {length}", math.nan, REPORT, "%")
        for length in PROMPTS
    ),
    Expected("all of the 95 % were reused", "reused", math.nan, HOLDS),
    Expected("TTFT is shorter with 95 % cached at every length", "shorter", math.nan, HOLDS),
]


def figure(lab: Lab, assumptions: Assumptions) -> Figure:
    found = measured()
    values: Values = {
        f"{part} {length} {cached}": getattr(parts, part)
        for (length, cached), parts in found.items()
        for part in ("ttft", *PARTS)
    }
    for length in PROMPTS:
        cold, warm = found[length, 0], found[length, 95]
        values[f"prefill saved {length}"] = 100.0 * (1.0 - warm.prefill / cold.prefill)
        values[f"ttft saved {length}"] = 100.0 * (1.0 - warm.ttft / cold.ttft)
    values["reused"] = float(all(found[n, 95].cached_tokens == shared_tokens(n) for n in PROMPTS))
    values["shorter"] = float(all(found[n, 95].ttft < found[n, 0].ttft for n in PROMPTS))
    panels = [
        Panel(
            f"{cached} % cached",
            "prompt (tokens)",
            "time (s)",
            [
                Series(
                    part.replace("_", " "),
                    [str(n) for n in PROMPTS],
                    [getattr(found[n, cached], part) for n in PROMPTS],
                    "measured",
                )
                for part in PARTS
            ],
            bars=True,
        )
        for cached in CACHED
    ]
    return Figure(TITLE, "measured", rows_of(EXPECTED, values), panels, NOTES)


def shared_tokens(length: int) -> int:
    """Whole blocks of the cached 95 %."""
    return length * 95 // 100 // BLOCK_TOKENS * BLOCK_TOKENS


def prompts(rng: np.random.Generator) -> list[tuple[int, int, list[int]]]:
    """(length, percent cached, tokens) in the order to send: each fresh prompt, then one that shares 95 % with it."""
    sent = []
    for _ in range(NUM_REPEATS):
        for length in PROMPTS:
            cold, tail = (rng.integers(*VOCABULARY, length).tolist() for _ in range(2))
            shared = shared_tokens(length)
            sent += [(length, 0, cold), (length, 95, [*cold[:shared], *tail[shared:]])]
    return sent


def measured() -> dict[tuple[int, int], Parts]:
    """The parts by length and percent cached."""
    cluster = ClusterConfig(
        model=str(smollm2_checkpoint("bfloat16")),
        run_dir=Path("run/real_fig14"),
        num_prefill=1,
        num_decode=1,
        num_stores=0,
        prefill_host_ids=("host-0",),
        dram_nbytes=2 << 30,
        staging_nbytes=1 << 30,
        compile_cache=default_compile_cache(),
        pin=True,
    )
    sent = prompts(np.random.default_rng(14))
    with Cluster(cluster) as running:
        parts = answered_one_by_one(
            running.instances["conductor"], [tokens for _, _, tokens in sent], NUM_DECODED, PAUSE_SECONDS
        )
    return {
        (length, cached): median(
            [part for (n, share, _), part in zip(sent, parts, strict=True) if (n, share) == (length, cached)]
        )
        for length in PROMPTS
        for cached in CACHED
    }

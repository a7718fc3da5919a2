"""Send a trace to a running cluster at its own pace, and write down what came back.

    python -m launch.replay --trace=conversation_trace.jsonl --url=http://127.0.0.1:8000 --model=tiny --limit=200
    python -m launch.replay --trace=conversation_trace.jsonl --conductor=127.0.0.1:9001 --csv=replay.csv

Open loop: a request is sent when the trace says so, however slow the answers are; how late this client itself was is
reported. Every arrival counts: answered, rejected (429) or failed. The trace's blocks of 512 tokens become blocks of
--block_tokens made-up tokens, equal where they are equal in the trace, and lengths shrink alike. Lines longer than
--max_tokens are left out and counted.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

from absl import flags
from tqdm import tqdm

from kvstore.errors import InvalidError
from launch.figures.render import write_png
from launch.process import UsageError, run_main
from launch.replaying.outcome import Outcome, Slo, plotted, summarize, write_csv
from launch.replaying.prompts import Line, Scale, lines
from launch.replaying.targets import ConductorTarget, OpenAITarget, Target, replay
from mooncake_jax.trace import BLOCK_TOKENS, read_trace

if __name__ == "__main__":
    TRACE = flags.DEFINE_string(
        "trace", None, "Trace in Mooncake's public format (JSON lines).", required=True
    )
    URL = flags.DEFINE_string("url", "", "OpenAI endpoint, without the /v1; or --conductor.")
    MODEL = flags.DEFINE_string("model", "", "Model that requests to --url ask for.")
    CONDUCTOR = flags.DEFINE_list(
        "conductor", [], "host:port of a Conductor, or of several: no HTTP between."
    )
    LIMIT = flags.DEFINE_integer("limit", 0, "Only the first so many lines; 0: all.", 0)
    SPEED = flags.DEFINE_float("speed", 1.0, "Arrivals come this many times faster than in the trace.", 1e-6)
    BLOCK = flags.DEFINE_integer(
        "block_tokens", BLOCK_TOKENS, "Tokens that stand for a block of the trace.", 1
    )
    OUTPUT_SHARE = flags.DEFINE_float(
        "output_share", 1.0, "Share of the answer's length that is asked for.", 0.0
    )
    MAX_TOKENS = flags.DEFINE_integer("max_tokens", 0, "Longest prompt + answer sent; 0: no limit.", 0)
    VOCAB = flags.DEFINE_integer("vocab_size", 250, "Token ids are below this.", 2)
    TTFT_SLO = flags.DEFINE_float("ttft_slo_seconds", 0.0, "Goodput counts up to this; 0: no limit.", 0.0)
    TBT_SLO = flags.DEFINE_float("tbt_slo_seconds", 0.0, "Goodput counts up to this; 0: no limit.", 0.0)
    CSV = flags.DEFINE_string("csv", "", "File for one line per arrival; none if empty.")
    PLOT = flags.DEFINE_string(
        "plot",
        "",
        "PNG file of TTFT and TBT over arrival time, and of what was refused or failed; needs matplotlib "
        "(pip install 'mooncake-jax[figures]'). None if empty.",
    )

    def target() -> Target:
        if bool(URL.value) == bool(CONDUCTOR.value):
            raise UsageError("give one of --url and --conductor")
        if URL.value and not MODEL.value:
            raise UsageError("--url needs --model, as the endpoint calls it")
        return OpenAITarget(URL.value, MODEL.value) if URL.value else ConductorTarget(*CONDUCTOR.value)

    def send(to: Target, requests: list[Line]) -> list[Outcome]:
        counts: Counter[str] = Counter()
        with tqdm(total=len(requests), desc="replay", file=sys.stderr, disable=None) as bar:

            def progress(outcome: Outcome) -> None:
                counts[outcome.status] += 1
                bar.set_postfix(counts, refresh=False)
                bar.update()

            return asyncio.run(replay(to, requests, progress))

    def main(_: object) -> None:
        to = target()
        scale = Scale(BLOCK.value, OUTPUT_SHARE.value, SPEED.value, MAX_TOKENS.value, VOCAB.value)
        try:
            requests, num_too_long = lines(read_trace(TRACE.value, LIMIT.value or None), scale)
        except InvalidError as error:
            raise UsageError(str(error)) from None
        print(
            f"{len(requests)} requests over {requests[-1].at_seconds if requests else 0:.1f} s; "
            f"{num_too_long} lines longer than {MAX_TOKENS.value or 'any'} tokens left out",
            flush=True,
        )
        outcomes = send(to, requests)
        if CSV.value:
            write_csv(Path(CSV.value), outcomes)
        print(summarize(outcomes, Slo(TTFT_SLO.value, TBT_SLO.value)).text(), flush=True)
        if PLOT.value:
            Path(PLOT.value).parent.mkdir(parents=True, exist_ok=True)
            write_png(Path(PLOT.value), plotted(outcomes, Path(TRACE.value).stem))

    run_main(main)

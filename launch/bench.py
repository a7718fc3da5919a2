"""Measure a part of the system, beside its peers where they are installed, and write the figures down.

    python -m launch.bench --suite=engine --json=engine.json --peers=.peers

Rounds of ours and the peer alternate; a ratio is the median of the per-round ratios (above 1: we are ahead).
`--quick` runs one short round of everything: a check that the bench works, not a figure to quote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from absl import flags

from launch.benchmarks.options import Options
from launch.benchmarks.prompts import trace_file
from launch.benchmarks.record import Machine, Suite
from launch.huge_pages import use_huge_pages
from launch.process import UsageError, run_main, stop_on_signals
from launch.supervisor import END_SECONDS

SUITES = ("engine", "transfer", "store", "schedule", "simulate")

_SUITE = flags.DEFINE_enum("suite", None, SUITES, "What to measure.", required=True)
_JSON = flags.DEFINE_string(
    "json", None, "File to write the rows to (JSON); its folder is made when missing."
)
_QUICK = flags.DEFINE_bool(
    "quick", False, "One short round of each row: checks the bench, gives no figure to quote."
)
_PEERS = flags.DEFINE_string(
    "peers", None, "Folder with the peers' venvs (vllm, mooncake, …); absent: ours alone."
)
_MODEL = flags.DEFINE_string(
    "model", "", "engine: checkpoint to measure; if empty, SmolLM2-135M-Instruct is fetched."
)
_TRACE = flags.DEFINE_string(
    "trace",
    os.environ.get("MOONCAKE_TRACES", ""),
    "schedule, simulate: a Mooncake trace, or the folder that has conversation_trace.jsonl (also by the environment "
    "variable MOONCAKE_TRACES); if empty, prompts are generated.",
)
_ROWS = flags.DEFINE_list("rows", [], "Only rows whose name starts with one of these.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}")
    peers = Path(_PEERS.value).resolve() if _PEERS.value else None
    if peers and not peers.is_dir():
        raise UsageError(f"--peers: {peers} is not a folder")
    trace = trace_file(Path(_TRACE.value)) if _TRACE.value else None
    if trace and not trace.is_file():
        raise UsageError(f"--trace: there is no file {trace}")
    stop_on_signals(END_SECONDS)  # peers and roles end with the bench, however it ends
    options = Options(_QUICK.value, peers, _MODEL.value, tuple(_ROWS.value), trace)
    rows = import_module(f"launch.benchmarks.{_SUITE.value}").run(options)
    suite = Suite(_SUITE.value, Machine.here(), rows)
    if _JSON.value:
        suite.write(Path(_JSON.value))
    print(suite.table())
    sys.stdout.flush()


if __name__ == "__main__":
    use_huge_pages()
    run_main(main)

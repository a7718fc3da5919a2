"""Say where the public traces come from, and check those that are here.

    python -m launch.fetch_traces --traces=../shared/traces

The traces are published with Mooncake (github.com/kvcache-ai/Mooncake, folder FAST25-release/traces, and the paper's
artifact). Put conversation_trace.jsonl, synthetic_trace.jsonl and toolagent_trace.jsonl into one folder and name it by
--traces or the environment variable MOONCAKE_TRACES. Known files are compared by sha256; every file is read strictly and
its statistics are printed beside the paper's Table 2.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from kvstore.errors import InvalidError
from launch.figures.lab import FILES
from launch.process import UsageError, run_main
from mooncake_jax.trace import Trace, read_trace

SHA256 = {
    "conversation": "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    "synthetic": "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
}
TABLE_2 = {  # requests, mean input, mean output, cache ratio in percent
    "conversation": (12_031, 12_035, 343, 40),
    "toolagent": (23_608, 8_596, 182, 59),
    "synthetic": (3_993, 15_325, 149, 66),
}

_TRACES = flags.DEFINE_string(
    "traces",
    os.environ.get("MOONCAKE_TRACES", "../shared/traces"),
    "Folder of the traces (also by the environment variable MOONCAKE_TRACES).",
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}")
    folder = Path(_TRACES.value)
    found = {name: folder / file for name, file in FILES.items() if (folder / file).is_file()}
    for name, path in found.items():
        try:
            print(f"{path}: {_checked(name, path)}\n{statistics(name, read_trace(path))}")
        except InvalidError as error:
            raise UsageError(str(error)) from error
    missing = [file for name, file in FILES.items() if name not in found]
    if missing:
        print(f"not in {folder}: {', '.join(missing)}. {_WHERE}")


_WHERE = (
    "The public traces are in the folder FAST25-release/traces of github.com/kvcache-ai/Mooncake: download them with a "
    "browser or git into one folder and name it by --traces or MOONCAKE_TRACES."
)


def _checked(name: str, path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if name not in SHA256:
        return f"sha256 {digest} (not known here)"
    if digest != SHA256[name]:
        raise UsageError(f"{path}: sha256 {digest}, the public file has {SHA256[name]}; fetch it again")
    return "the public file, by its sha256"


def statistics(name: str, trace: Trace) -> str:
    """A trace's figures beside Table 2."""
    ours = trace.statistics
    requests, mean_input, mean_output, cached = TABLE_2[name]
    return (
        f"  requests {ours.num_requests} (Table 2: {requests}), {ours.span_seconds:.0f} s\n"
        f"  mean input {ours.mean_input_tokens:.0f} ({mean_input}), output {ours.mean_output_tokens:.0f} ({mean_output})\n"
        f"  cached with an infinite cache: {100 * ours.cached_tokens:.1f} % of tokens, "
        f"{100 * ours.cached_per_request:.1f} % as a mean over requests ({cached})"
    )


if __name__ == "__main__":
    run_main(main)

"""What the demo prints and writes."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from launch.demonstration.client import Exchange
from mooncake_jax.equality import EqualityReport


def show(exchange: Exchange) -> None:
    """One answer, as it comes."""
    reused = f"{exchange.cached_tokens} of {len(exchange.prompt)} prompt tokens reused"
    fetched = f" ({exchange.fetched_tokens} fetched from another node)" if exchange.fetched_tokens else ""
    where = f"{exchange.prefill} → {exchange.decode}"
    print(f"\n[{exchange.id}] {where}; first token after {exchange.ttft_seconds:.3f} s; {reused}{fetched}")
    print(textwrap.indent(textwrap.fill(exchange.text.strip(), 96), "    "), flush=True)


@dataclass(frozen=True)
class Outcome:
    """All of a demo's results. `checks[i]` belongs to `exchanges[i]`."""

    exchanges: list[Exchange]
    checks: list[EqualityReport]
    moved_nbytes: dict[str, int]
    compiles_after_ready: int

    @property
    def all_equal(self) -> bool:
        return all(check.equal for check in self.checks)

    def show(self) -> None:
        print(f"\n{'request':<12}{'prompt':>7}{'reused':>8}{'fetched':>9}{'TTFT':>10}  {'prefill':<11}equal")
        for one, check in zip(self.exchanges, self.checks, strict=True):
            counts = f"{len(one.prompt):>7}{one.cached_tokens:>8}{one.fetched_tokens:>9}"
            verdict = f"yes, mean |Δlogprob| {check.mean_abs_dlogprob:.4f}"
            print(
                f"{one.id:<12}{counts}{one.ttft_seconds:>8.3f} s  {one.prefill:<11}"
                f"{check.first_violation or verdict}"
            )
        moved = ", ".join(f"{nbytes / 1e6:.1f} MB by {path}" for path, nbytes in self.moved_nbytes.items())
        print(f"\nKV moved: {moved}; programs compiled after ready: {self.compiles_after_ready}")
        verdict = "equals" if self.all_equal else "DOES NOT EQUAL"
        print(f"every answer {verdict} that of one process (the rule for bfloat16: |Δlogprob| at most 0.2)")


def write_summary(path: Path, outcome: Outcome) -> None:
    """`summary.json`, for programs."""
    requests = [
        {
            "id": one.id,
            "prompt_tokens": len(one.prompt),
            "cached_tokens": one.cached_tokens,
            "prefill": one.prefill,
            "decode": one.decode,
            "ttft_seconds": one.ttft_seconds,
            "text": one.text,
            "equal_to_monolith": check.equal,
        }
        for one, check in zip(outcome.exchanges, outcome.checks, strict=True)
    ]
    summary = {
        "requests": requests,
        "bytes": outcome.moved_nbytes,
        "all_equal": outcome.all_equal,
        "compiles_after_ready": outcome.compiles_after_ready,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

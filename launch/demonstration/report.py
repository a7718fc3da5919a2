"""What the demo prints and writes."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from launch.demonstration.client import Exchange


def show(exchange: Exchange) -> None:
    """One answer, as it comes."""
    reused = f"{exchange.cached_tokens} of {len(exchange.prompt)} prompt tokens reused"
    fetched = f" ({exchange.fetched_tokens} fetched from another node)" if exchange.fetched_tokens else ""
    where = f"{exchange.prefill} → {exchange.decode}"
    print(f"\n[{exchange.id}] {where}; first token after {exchange.ttft_seconds:.3f} s; {reused}{fetched}")
    print(textwrap.indent(textwrap.fill(exchange.text.strip(), 96), "    "), flush=True)


@dataclass(frozen=True)
class Outcome:
    """All of a demo's results. `equal[i]` belongs to `exchanges[i]`."""

    exchanges: list[Exchange]
    equal: list[bool]
    moved_nbytes: dict[str, int]
    compiles_after_ready: int

    @property
    def all_equal(self) -> bool:
        return all(self.equal)

    def show(self) -> None:
        print(
            f"\n{'request':<12} {'prompt':>6} {'reused':>6} {'fetched':>7} {'TTFT':>8}  {'prefill':<10} equal"
        )
        for one, equal in zip(self.exchanges, self.equal, strict=True):
            print(
                f"{one.id:<12} {len(one.prompt):>6} {one.cached_tokens:>6} {one.fetched_tokens:>7}"
                f" {one.ttft_seconds:>6.3f} s  {one.prefill:<10} {'yes' if equal else 'NO'}"
            )
        moved = ", ".join(f"{nbytes / 1e6:.1f} MB by {path}" for path, nbytes in self.moved_nbytes.items())
        print(f"\nKV moved: {moved}; programs compiled after ready: {self.compiles_after_ready}")
        print(
            "every answer equals the monolith's" if self.all_equal else "ANSWERS DIFFER FROM THE MONOLITH'S"
        )


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
            "equal_to_monolith": equal,
        }
        for one, equal in zip(outcome.exchanges, outcome.equal, strict=True)
    ]
    summary = {
        "requests": requests,
        "bytes": outcome.moved_nbytes,
        "all_equal": outcome.all_equal,
        "compiles_after_ready": outcome.compiles_after_ready,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

"""What every suite is told on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    quick: bool
    peers: Path | None
    model: str
    rows: tuple[str, ...]  # prefixes of the rows wanted; empty: all
    trace: Path | None = None  # a Mooncake trace; None: prompts are generated

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 5

    def wants(self, name: str) -> bool:
        return not self.rows or name.startswith(self.rows)

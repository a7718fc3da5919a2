"""What the paper does not say, in one file: what is assumed, what else could be, and why."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvstore.errors import InvalidError
from mooncake_jax.simulation.config import Dispatch
from mooncake_jax.simulation.discipline import DisciplineName

FILE = Path(__file__).parents[1] / "configs" / "assumptions.toml"


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value of everything that is unknown."""

    prefill_nodes: int
    discipline: DisciplineName
    balancing_threshold: float
    chunk_tokens: int
    dispatch: Dispatch
    decode_slots: int
    seed: int


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: Any
    why: str
    range: list[Any] = []


@dataclass(frozen=True)
class Assumptions:
    """The chosen values, and for each name what else is tried."""

    chosen: Chosen
    ranges: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = FILE) -> Assumptions:
        """Raises InvalidError that names the file, and what is wrong in it."""
        try:
            entries = msgspec.convert(tomllib.loads(path.read_text()), dict[str, _Entry])
            chosen = msgspec.convert({name: entry.value for name, entry in entries.items()}, Chosen)
            for name, entry in entries.items():
                for value in entry.range:
                    msgspec.convert({**msgspec.to_builtins(chosen), name: value}, Chosen)
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise InvalidError(f"assumptions {path}: {error}") from error
        return cls(chosen, {name: entry.range for name, entry in entries.items()})

    def variants(self, names: Sequence[str]) -> Iterator[Chosen]:
        """The chosen values with one of `names` changed at a time, to each other value of its range."""
        for name in names:
            for value in self.ranges[name]:
                if value != getattr(self.chosen, name):
                    yield msgspec.structs.replace(self.chosen, **{name: value})

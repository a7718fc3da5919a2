"""What crosses between devices, read from the text of a compiled program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATION = re.compile(
    r"= (?P<shape>\([^=]*?\)|\S+) "
    r"(?P<kind>collective-permute|all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\("
)
_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")


@dataclass(frozen=True)
class Collective:
    """One operation of a program, and how many elements a device that takes part sends for it."""

    kind: str
    num_elements: int  # of its result on one device
    num_devices: int  # in a group; of a permutation, 2
    sent_elements: float


def collectives(hlo: str) -> list[Collective]:
    """All of an optimised HLO module, in the order of its text; one in a loop is listed once.

    A device sends a permutation's whole array, (n-1)/n of the result of an all-gather or an all-to-all, twice that of
    an all-reduce and n-1 times the result of a reduce-scatter: what rings of n devices need.
    """
    return list(_found(hlo))


def sent_elements(hlo: str) -> float:
    """Of all collectives of a module together, by one device."""
    return sum(one.sent_elements for one in _found(hlo))


def _found(hlo: str) -> Iterator[Collective]:
    for line in hlo.splitlines():
        match = _OPERATION.search(line)
        if match is None:
            continue
        kind = match["kind"]
        sizes = [
            math.prod(map(int, filter(None, dims.split(",")))) for dims in _SHAPE.findall(match["shape"])
        ]
        count = sum(sizes)
        if kind == "collective-permute":
            yield Collective(kind, count, 2, float(count))
            continue
        group = _GROUP.search(line)
        if group is None:
            raise ValueError(f"a collective without replica groups: {line.strip()[:200]}")
        n = len(group[1].split(",")) if group[1] else int(group[2])
        share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0}.get(kind, (n - 1) / n)
        yield Collective(kind, count, n, count * share)

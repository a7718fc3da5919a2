"""What a figure shows: rows with a verdict each, and the curves of its panels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Verdict = Literal["inside", "outside", "report"]
Kind = Literal["simulated", "measured", "computed", "emulated"]
Values = dict[str, float]


class Gate(NamedTuple):
    """When a row counts as reproduced. `test(paper, ours)`; None: it is only reported."""

    text: str
    test: Callable[[float, float], bool] | None


REPORT = Gate("not gated", None)


def within(share: float) -> Gate:
    """At most so far from the paper's value, as a share of it."""
    return Gate(f"±{share:.0%}", lambda paper, ours: abs(ours - paper) <= share * abs(paper))


def points(distance: float, unit: str = "points") -> Gate:
    """At most so far from the paper's value."""
    return Gate(f"±{distance:g} {unit}", lambda paper, ours: abs(ours - paper) <= distance)


def factor(bound: float) -> Gate:
    """At most so many times more or less."""
    return Gate(
        f"factor {bound:g}",
        lambda paper, ours: ours > 0.0 and 1.0 / bound <= ours / paper <= bound,
    )


def at_least(bound: float) -> Gate:
    return Gate(f"≥ {bound:g}", lambda paper, ours: ours >= bound)


def at_most(bound: float) -> Gate:
    return Gate(f"≤ {bound:g}", lambda paper, ours: ours <= bound)


def between(low: float, high: float) -> Gate:
    return Gate(f"{low:g} to {high:g}", lambda paper, ours: low <= ours <= high)


HOLDS = Gate("holds", lambda paper, ours: ours == 1.0)  # a statement: 1 if it is true


class Expected(NamedTuple):
    """A row before it is measured. `key` is its value's; `paper` nan: not in the paper, or a statement that holds there
    by reading it."""

    quantity: str
    key: str
    paper: float
    gate: Gate
    unit: str = ""


@dataclass(frozen=True)
class Row:
    """A quantity: the paper's value, ours, and what the assumptions make of ours."""

    quantity: str
    unit: str
    paper: float
    ours: float
    gate: Gate
    low: float
    high: float

    @property
    def error(self) -> float:
        """Ours over the paper's, less 1; nan without a paper's value."""
        return self.ours / self.paper - 1.0 if self.paper else math.nan

    @property
    def states(self) -> bool:
        """A statement, which is true or not."""
        return self.gate is HOLDS

    @property
    def verdict(self) -> Verdict:
        if self.gate.test is None:
            return "report"
        return "inside" if self.gate.test(self.paper, self.ours) else "outside"


@dataclass(frozen=True)
class Series:
    """A curve or the bars of one colour. `source`: where the values come from."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    source: Kind | Literal["paper"]


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    bars: bool = False


@dataclass(frozen=True)
class Figure:
    """`notes` say what cannot be reproduced, and why."""

    title: str
    kind: Kind
    rows: Sequence[Row]
    panels: Sequence[Panel]
    notes: Sequence[str] = ()
    varied: Mapping[str, Sequence[object]] = field(default_factory=dict)  # assumption → values tried


def rows_of(expected: Sequence[Expected], values: Values, variants: Sequence[Values] = ()) -> list[Row]:
    """Rows for `values`, with the least and the most among them and `variants`; keys not measured are left out."""
    rows = []
    for one in expected:
        if one.key not in values:
            continue
        all_values = [values[one.key], *(variant[one.key] for variant in variants if one.key in variant)]
        rows.append(
            Row(
                one.quantity, one.unit, one.paper, values[one.key], one.gate, min(all_values), max(all_values)
            )
        )
    return rows

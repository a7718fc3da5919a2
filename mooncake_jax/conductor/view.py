"""The cluster as the scheduler sees it: NumPy columns with stable slots, a version, rows to log and replay.

A slot is an instance's place in the columns for as long as it lives; slots of instances that left are used
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from kvstore.errors import InvalidError


class PrefillRow(msgspec.Struct, frozen=True, array_like=True):
    """One prefill instance."""

    name: str
    alive: bool
    max_tokens: int
    num_slots: int  # prompts it can hold in flight
    num_requests: int  # queued or running, bookings it has not seen included
    busy_until: float  # clock seconds when its queue is empty
    factor: float  # measured over modelled prefill time


class DecodeRow(msgspec.Struct, frozen=True, array_like=True):
    """One decode instance."""

    name: str
    alive: bool
    max_tokens: int
    num_slots: int  # batch size, 1 or more
    num_requests: int  # running or on their way, bookings it has not seen included
    kv_tokens: int  # held now, or soon (prompts on their way)
    committed_tokens: int  # if every request ran to its max_tokens
    capacity_tokens: int
    factor: float = 1.0  # measured over modelled token interval


Row = TypeVar("Row", PrefillRow, DecodeRow)
Settings = TypeVar("Settings")


_no_bools = partial(np.zeros, 0, bool)
_no_ints = partial(np.zeros, 0, np.int64)
_no_floats = partial(np.zeros, 0, np.float64)


@dataclass(eq=False)
class _Columns(Generic[Row]):
    rows: list[Row] = field(default_factory=list)
    alive: np.ndarray = field(default_factory=_no_bools)
    max_tokens: np.ndarray = field(default_factory=_no_ints)
    num_slots: np.ndarray = field(default_factory=_no_ints)
    num_requests: np.ndarray = field(default_factory=_no_ints)
    _columns: list[np.ndarray] = field(default_factory=list)  # the arrays above and below, as a row has them
    _derived: list[np.ndarray] = field(default_factory=list)  # [N] each
    _derived_by: tuple[object, object] = (None, None)
    _stale: set[int] = field(default_factory=set)  # slots written since

    @property
    def names(self) -> list[str]:
        return [row.name for row in self.rows]

    def put(self, slot: int, row: Row) -> None:
        if not 0 <= slot <= len(self.rows):
            raise InvalidError(f"view: slot {slot} after {len(self.rows)} slots; slots are filled in order")
        if slot == len(self.rows):
            self.rows.append(row)
            self._derived_by = (None, None)
            self._columns = []
            for column in row.__struct_fields__[1:]:
                array = getattr(self, column)
                setattr(self, column, grown := np.append(array, array.dtype.type(0)))
                self._columns.append(grown)
        self.rows[slot] = row
        self._stale.add(slot)
        for array, value in zip(self._columns, msgspec.structs.astuple(row)[1:], strict=True):
            array[slot] = value

    def derived(
        self, derive: Callable[[Row, Settings], tuple[float, ...]], settings: Settings
    ) -> list[np.ndarray]:
        """`derive(row, settings)` of every row as columns, `[N]` each; computed anew only for rows that changed.

        `derive` is pure and `settings` never change: asked again with the same objects, it costs nothing.
        """
        if self._derived_by != (derive, settings):
            values = np.array([derive(row, settings) for row in self.rows])
            self._derived = [column.copy() for column in values.T]
            self._derived_by = (derive, settings)
        elif self._stale:
            for slot in self._stale:
                for column, value in zip(self._derived, derive(self.rows[slot], settings), strict=True):
                    column[slot] = value
        self._stale.clear()
        return self._derived


@dataclass(eq=False)
class PrefillColumns(_Columns[PrefillRow]):
    """`PrefillRow`s as arrays `[P]`."""

    busy_until: np.ndarray = field(default_factory=_no_floats)
    factor: np.ndarray = field(default_factory=_no_floats)


@dataclass(eq=False)
class DecodeColumns(_Columns[DecodeRow]):
    """`DecodeRow`s as arrays `[D]`."""

    kv_tokens: np.ndarray = field(default_factory=_no_ints)
    committed_tokens: np.ndarray = field(default_factory=_no_ints)
    capacity_tokens: np.ndarray = field(default_factory=_no_ints)
    factor: np.ndarray = field(default_factory=_no_floats)


class Changes(msgspec.Struct, frozen=True):
    """Rows written since the last look, by slot; from an empty view on, all changes in order rebuild it."""

    prefill: list[tuple[int, PrefillRow]]
    decode: list[tuple[int, DecodeRow]]


class ClusterView:
    """All that a decision may look at, besides the request and its prefix match."""

    def __init__(self) -> None:
        self.version = 0
        self.prefill = PrefillColumns()
        self.decode = DecodeColumns()
        self._prefill_changes: dict[int, PrefillRow] = {}
        self._decode_changes: dict[int, DecodeRow] = {}

    def put_prefill(self, slot: int, row: PrefillRow) -> None:
        """Write one row; slot P (the next) grows the columns. Raises InvalidError for a slot beyond that."""
        self.prefill.put(slot, row)
        self._prefill_changes[slot] = row
        self.version += 1

    def put_decode(self, slot: int, row: DecodeRow) -> None:
        """As `put_prefill`."""
        self.decode.put(slot, row)
        self._decode_changes[slot] = row
        self.version += 1

    def prefill_rows(self) -> list[PrefillRow]:
        return list(self.prefill.rows)

    def decode_rows(self) -> list[DecodeRow]:
        return list(self.decode.rows)

    def take_changes(self) -> Changes:
        """The rows written since the last call."""
        changes = Changes(sorted(self._prefill_changes.items()), sorted(self._decode_changes.items()))
        self._prefill_changes, self._decode_changes = {}, {}
        return changes

    def apply(self, changes: Changes, version: int) -> None:
        """Write logged rows and take over the logged version (replay)."""
        for slot, row in changes.prefill:
            self.put_prefill(slot, row)
        for slot, row in changes.decode:
            self.put_decode(slot, row)
        self.version = version

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {
            "version": self.version,
            "prefill": [msgspec.to_builtins(row) for row in self.prefill_rows()],
            "decode": [msgspec.to_builtins(row) for row in self.decode_rows()],
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ClusterView:
        """The inverse of `to_dict`. Raises InvalidError for anything else."""
        try:
            snapshot = msgspec.convert(raw, _Snapshot)
        except msgspec.ValidationError as error:
            raise InvalidError(f"cluster view: {error}") from error
        view = cls()
        view.apply(Changes(_numbered(snapshot.prefill), _numbered(snapshot.decode)), snapshot.version)
        return view


class _Snapshot(msgspec.Struct, frozen=True):
    version: int
    prefill: list[PrefillRow]
    decode: list[DecodeRow]


def _numbered(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    return list(enumerate(rows))

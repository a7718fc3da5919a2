"""Every decision with all it was made from: a ring in memory and, if wanted, a file of JSON lines.

A record holds the view rows that changed since the record before it, so that replaying records in order
rebuilds the view of each decision. The first line of a file is the `ScheduleConfig`, and its first record has
every row. The file also says when phases of requests ended (`EndRecord`), so that a run can be told from it.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from kvstore.errors import InvalidError
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, Link, PrefixLengths, RequestFeatures
from mooncake_jax.conductor.schedule import schedule
from mooncake_jax.conductor.view import Changes, ClusterView, DecodeRow, PrefillRow
from mooncake_jax.messages import RequestEnd

log = logging.getLogger(__name__)


class LoggedLink(msgspec.Struct, frozen=True, array_like=True):
    """A `Link` as JSON can say it: a number for all prefill instances, or one each."""

    start_seconds: float | list[float]
    seconds_per_nbyte: float | list[float]

    @classmethod
    def of(cls, link: Link | None) -> LoggedLink | None:
        return (
            cls(*(part.tolist() if isinstance(part, np.ndarray) else part for part in link)) if link else None
        )

    @property
    def link(self) -> Link:
        parts = (self.start_seconds, self.seconds_per_nbyte)
        return Link(*(np.array(part) if isinstance(part, list) else part for part in parts))


class DecisionRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="decision"):
    """One call of `schedule`, and what it answered."""

    request_id: str
    now: float
    version: int  # of the view it was made from
    changes: Changes  # rows written since the record before
    request: RequestFeatures
    local: list[int]  # the prefix lengths, see `PrefixLengths`
    best: int
    holder: str
    link: LoggedLink | None  # None: idle, as the cost model says
    own_seconds: list[float] | None  # None: no instance has blocks of the prompt on SSD
    continued: int
    balancing_threshold: float | None  # in force, which is not the config's when it adapts; None: infinite
    draws: tuple[float, float]
    decision: Decision

    @property
    def lengths(self) -> PrefixLengths:
        link = self.link.link if self.link else None
        own_seconds = None if self.own_seconds is None else np.array(self.own_seconds)
        local = np.array(self.local, np.int64)
        return PrefixLengths(local, self.best, self.holder, link, own_seconds, self.continued)

    def config(self, config: ScheduleConfig) -> ScheduleConfig:
        """`config` with the threshold that was in force."""
        threshold = math.inf if self.balancing_threshold is None else self.balancing_threshold
        if threshold == config.balancing_threshold:
            return config
        return msgspec.structs.replace(config, balancing_threshold=threshold)


class EndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """A phase of a request was over, as the Conductor heard of it."""

    now: float
    end: RequestEnd


class DecisionLog:
    """Keeps the last `num_records` decisions, and appends all of them to `path` if there is one."""

    def __init__(
        self, config: ScheduleConfig, *, num_records: int, path: str = "", max_nbytes: int = 256 << 20
    ):
        """Starts a new file; one of that name from before is kept as PATH.1. Raises OSError."""
        self._config = config
        self._records: deque[DecisionRecord] = deque()
        self._num_records = num_records
        self._prefill: dict[int, PrefillRow] = {}  # all rows before the oldest record of the ring
        self._decode: dict[int, DecodeRow] = {}
        self._path, self._max_nbytes, self._file = path, max_nbytes, None
        if path:
            self._file = self._start_file()

    def append(self, record: DecisionRecord) -> None:
        self._records.append(record)
        self._write(record)
        if len(self._records) > self._num_records:
            oldest = self._records.popleft()
            self._prefill.update(oldest.changes.prefill)
            self._decode.update(oldest.changes.decode)

    def ended(self, end: RequestEnd, now: float) -> None:
        """A phase of a request is over; kept in the file only."""
        self._write(EndRecord(now, end))

    def _write(self, record: DecisionRecord | EndRecord) -> None:
        if self._file is None:
            return
        try:
            if self._file.tell() > self._max_nbytes and isinstance(record, DecisionRecord):
                self._file.close()
                self._file = self._start_file()
                record = self._whole(self._records)
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            log.error("decision log %s: %s; it ends here, placing goes on", self._path, error)
            with suppress(OSError):
                self.close()

    def records(self) -> list[DecisionRecord]:
        """The last decisions, oldest first; the first has every row of its view, so they can be replayed."""
        if not self._records:
            return []
        rest = iter(self._records)
        return [self._whole([next(rest)]), *rest]

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _whole(self, records: Iterable[DecisionRecord]) -> DecisionRecord:
        prefill, decode = dict(self._prefill), dict(self._decode)
        record = None
        for record in records:
            prefill.update(record.changes.prefill)
            decode.update(record.changes.decode)
        if record is None:
            raise ValueError("no record to make whole")
        return msgspec.structs.replace(
            record, changes=Changes(sorted(prefill.items()), sorted(decode.items()))
        )

    def _start_file(self) -> IO[bytes]:
        if os.path.exists(self._path):
            os.replace(self._path, self._path + ".1")
        file = open(self._path, "wb", buffering=0)  # noqa: SIM115
        file.write(json.dumps(msgspec.to_builtins(self._config)).encode() + b"\n")  # json: has infinity
        return file


def read_decision_log(path: str | Path) -> tuple[ScheduleConfig, list[DecisionRecord]]:
    """A log file's config and decisions. Raises InvalidError that names the line."""
    config, records = read_log(path)
    return config, [record for record in records if isinstance(record, DecisionRecord)]


def read_log(path: str | Path) -> tuple[ScheduleConfig, list[DecisionRecord | EndRecord]]:
    """All of a log file, in the order of time. Raises InvalidError that names the line."""
    lines = Path(path).read_bytes().splitlines()
    if not lines:
        raise InvalidError(f"decision log {path}: empty")
    number = 1
    try:
        config = msgspec.convert(json.loads(lines[0]), ScheduleConfig)
        decode = msgspec.json.Decoder(DecisionRecord | EndRecord).decode
        records: list[DecisionRecord | EndRecord] = []
        for line in lines[1:]:
            number += 1
            records.append(decode(line))
    except (ValueError, msgspec.MsgspecError) as error:
        raise InvalidError(f"decision log {path}, line {number}: {error}") from error
    return config, records


def replay(
    config: ScheduleConfig, records: Iterable[DecisionRecord]
) -> Iterator[tuple[DecisionRecord, Decision]]:
    """Rebuild the view of each record and decide again: each record with the decision made now."""
    view = ClusterView()
    for record in records:
        view.apply(record.changes, record.version)
        decision = schedule(
            view, record.request, record.lengths, record.config(config), now=record.now, draws=record.draws
        )
        yield record, decision

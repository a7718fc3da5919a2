"""A run that was recorded, decided again by the simulator from its arrivals and completions; and why it differs.

A recording is a decision log with the prompt's blocks beside each decision. Of a decision the simulator is told the
arrival and where it went; the views that were logged serve to explain differences only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from kvstore.block import chain_keys, root_key
from kvstore.errors import InvalidError
from launch.figures.result import HOLDS, REPORT, Figure, Kind, Panel, Row, Series, at_least
from launch.local_cluster import Cluster, ClusterConfig
from launch.replaying.outcome import Outcome
from launch.replaying.prompts import Line
from launch.replaying.targets import ConductorTarget, replay
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, PrefixLengths
from mooncake_jax.conductor.decision_log import DecisionRecord, EndRecord, read_log
from mooncake_jax.conductor.schedule import schedule
from mooncake_jax.conductor.view import ClusterView, DecodeRow, PrefillRow
from mooncake_jax.simulation.rebuilt import Arrival, Rebuilt

Reason = Literal["prefix", "link", "queue", "factor", "decode", "several", "unexplained"]
REASONS: dict[Reason, str] = {
    "prefix": "blocks that a node had announced, or had given up, at another moment",
    "link": "the measured rate of the way from the holder",
    "queue": "what heartbeats said of a prefill queue",
    "factor": "the learned pace of a prefill instance",
    "decode": "what heartbeats said of a decode batch, and its learned pace",
    "several": "more than one of these",
    "unexplained": "not even with all that was logged",
}
SAME_AT_LEAST = 95.0  # percent of the decisions


class RecordedArrival(msgspec.Struct, frozen=True, tag_field="kind", tag="arrival"):
    """A decision as it was logged, and the blocks of the prompt."""

    record: DecisionRecord
    chain: list[int]

    @property
    def arrival(self) -> Arrival:
        record = self.record
        return Arrival(record.request_id, record.now, record.request, self.chain, record.draws)


Event = RecordedArrival | EndRecord


@dataclass(frozen=True)
class Recording:
    """Events in the order of time. `dram_blocks`: of a prefill instance's home node."""

    config: ScheduleConfig
    dram_blocks: int
    events: Sequence[Event]

    @classmethod
    def of(
        cls,
        config: ScheduleConfig,
        log: Sequence[DecisionRecord | EndRecord],
        chains: dict[str, list[int]],
        dram_blocks: int,
    ) -> Recording:
        """`log` with the blocks of each request by its id. Raises InvalidError for one that is not in `chains`."""
        events: list[Event] = []
        for record in log:
            if isinstance(record, EndRecord):
                events.append(record)
                continue
            if record.request_id not in chains:
                raise InvalidError(f"decision log: request {record.request_id!r} was not sent by this run")
            events.append(RecordedArrival(record, chains[record.request_id]))
        return cls(config, dram_blocks, events)

    def write(self, path: Path) -> None:
        """Raises OSError."""
        head = {"config": msgspec.to_builtins(self.config), "dram_blocks": self.dram_blocks}
        lines = [json.dumps(head).encode(), *(msgspec.json.encode(event) for event in self.events)]
        path.write_bytes(b"\n".join(lines) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Raises InvalidError that names the line."""
        number = 1
        try:
            head, *lines = path.read_bytes().splitlines()
            raw = json.loads(head)
            config = msgspec.convert(raw["config"], ScheduleConfig)
            decode, events = msgspec.json.Decoder(Event).decode, []
            for line in lines:
                number += 1
                events.append(decode(line))
        except (OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidError(f"recording {path}, line {number}: {error}") from error
        return cls(config, int(raw["dram_blocks"]), events)


@dataclass(frozen=True)
class Comparison:
    """`differences`: by number of the decision, what each rests on."""

    num_decisions: int
    differences: dict[int, Reason]

    @property
    def same_percent(self) -> float:
        return 100.0 * (1.0 - len(self.differences) / max(self.num_decisions, 1))

    @property
    def reasons(self) -> Counter[Reason]:
        return Counter(self.differences.values())


def serve(
    cluster: ClusterConfig, sent: list[Line]
) -> tuple[list[Outcome], ScheduleConfig, list[DecisionRecord | EndRecord]]:
    """Send the lines to a cluster of processes, each at its time: what came of them, and its Conductor's log.

    Raises SupervisorError.
    """
    path = Path(cluster.run_dir) / "decisions.jsonl"
    logging = dataclasses.replace(
        cluster, conductor_flags=(*cluster.conductor_flags, f"--decision_log={path.absolute()}")
    )
    with Cluster(logging) as running:
        target = ConductorTarget(running.instances["conductor"])
        outcomes = asyncio.run(replay(target, sent, lambda outcome: None))
    return outcomes, *read_log(path)


def record(cluster: ClusterConfig, sent: list[Line]) -> Recording:
    """`serve`, and the log with the blocks of every prompt. Raises InvalidError if nothing was decided."""
    _, config, log = serve(cluster, sent)
    decisions = [one for one in log if isinstance(one, DecisionRecord)]
    if not decisions:
        raise InvalidError(f"run {cluster.run_dir}: no decision was logged")
    block = decisions[0].request
    chains = block_chains(sent, block.block_tokens)
    named = {one.request_id: chains[int(one.request_id.rsplit("-", 1)[1])] for one in decisions}
    return Recording.of(config, log, named, cluster.dram_nbytes // block.block_nbytes)


def block_chains(sent: Sequence[Line], block_tokens: int) -> dict[int, list[int]]:
    """By line: the full blocks of its prompt, numbered as they are met."""
    numbers: dict[bytes, int] = {}
    root = root_key(b"recorded")
    return {
        line.index: [
            numbers.setdefault(key, len(numbers)) for key in chain_keys(root, line.tokens, block_tokens)
        ]
        for line in sent
    }


def compare(recording: Recording) -> Comparison:
    """Decide every arrival of `recording` again. Raises InvalidError for a recording without decisions."""
    first = next((event for event in recording.events if isinstance(event, RecordedArrival)), None)
    if first is None:
        raise InvalidError("recording: no decision in it")
    decode_rows = [row for _, row in first.record.changes.decode]
    rebuilt = Rebuilt(
        recording.config,
        num_prefill=len(first.record.changes.prefill),
        num_decode=len(decode_rows),
        decode_slots=decode_rows[0].num_slots,
        decode_tokens=decode_rows[0].capacity_tokens,
        dram_blocks=recording.dram_blocks,
    )
    logged, differences, num_decisions = ClusterView(), dict[int, Reason](), 0
    for event in recording.events:
        if isinstance(event, EndRecord):
            rebuilt.ended(event.end, event.now)
            continue
        record = event.record
        logged.apply(record.changes, record.version)
        decision, lengths, view = rebuilt.decide(event.arrival)
        if not same(decision, record.decision):
            differences[num_decisions] = _reason(rebuilt.config, record, lengths, view, logged)
        if record.decision.outcome == "placed":
            rebuilt.placed(event.arrival, lengths, record.decision)
        num_decisions += 1
    return Comparison(num_decisions, differences)


def same(one: Decision, other: Decision) -> bool:
    """Both refuse for the same reason, or choose the same pair and both fetch or neither does."""

    def chosen(decision: Decision) -> tuple[object, ...]:
        return decision.outcome, decision.prefill, decision.decode, decision.fetch_blocks > 0

    return chosen(one) == chosen(other)


def _reason(
    config: ScheduleConfig,
    record: DecisionRecord,
    lengths: PrefixLengths,
    view: ClusterView,
    logged: ClusterView,
) -> Reason:
    """The first thing that, taken from the log alone, makes the decisions equal."""
    told = record.lengths

    def decided(parts: set[Reason]) -> Decision:
        local, best = (told.local, told.best) if "prefix" in parts else (lengths.local, lengths.best)
        mixed = ClusterView()
        for slot, (ours, theirs) in enumerate(zip(view.prefill.rows, logged.prefill.rows, strict=True)):
            mixed.put_prefill(slot, _mixed(ours, theirs, parts))
        for slot, (ours, theirs) in enumerate(zip(view.decode.rows, logged.decode.rows, strict=True)):
            mixed.put_decode(slot, theirs if "decode" in parts else _like(ours, theirs))
        own_seconds, continued = (told.own_seconds, told.continued) if "prefix" in parts else (None, 0)
        link = told.link if "link" in parts else None
        return schedule(
            mixed,
            record.request,
            PrefixLengths(local, best, told.holder, link, own_seconds, continued),
            record.config(config),
            now=record.now,
            draws=record.draws,
        )

    single: tuple[Reason, ...] = ("queue", "prefix", "factor", "link", "decode")
    for reason in single:
        if same(decided({reason}), record.decision):
            return reason
    return "several" if same(decided(set(single)), record.decision) else "unexplained"


def _mixed(ours: PrefillRow, theirs: PrefillRow, parts: set[Reason]) -> PrefillRow:
    return msgspec.structs.replace(
        theirs,
        num_requests=theirs.num_requests if "queue" in parts else ours.num_requests,
        busy_until=theirs.busy_until if "queue" in parts else ours.busy_until,
        factor=theirs.factor if "factor" in parts else ours.factor,
    )


def _like(ours: DecodeRow, theirs: DecodeRow) -> DecodeRow:
    return msgspec.structs.replace(ours, name=theirs.name, max_tokens=theirs.max_tokens)


def figure(title: str, kind: Kind, comparison: Comparison, notes: Sequence[str] = ()) -> Figure:
    """The share of equal decisions, and a row for every kind of difference."""
    counts, none = comparison.reasons, float("nan")

    def row(quantity: str, unit: str, value: float, gate=REPORT) -> Row:
        return Row(quantity, unit, none, value, gate, value, value)

    rows = [
        row("decisions", "", float(comparison.num_decisions)),
        row("decided alike", "%", comparison.same_percent, at_least(SAME_AT_LEAST)),
        *(row(f"differ by: {REASONS[reason]}", "", float(number)) for reason, number in counts.items()),
        row("every difference is explained", "", float(not counts["unexplained"]), HOLDS),
    ]
    bars = [Series(kind, list(counts) or ["none"], [float(n) for n in counts.values()] or [0.0], kind)]
    return Figure(
        title, kind, rows, [Panel("decisions that differ", "by", "decisions", bars, bars=True)], notes
    )

"""Why a request went where it went: every instance with its forecast, and what spoke against it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.errors import NotFoundError
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision_log import DecisionRecord
from mooncake_jax.conductor.policy import POLICIES
from mooncake_jax.conductor.schedule import forecast_decode, forecast_prefill, open_prefill
from mooncake_jax.conductor.view import ClusterView, DecodeRow, PrefillRow
from mooncake_jax.messages import ConsideredDecode, ConsideredPrefill, Explanation


def explain(config: ScheduleConfig, records: Iterable[DecisionRecord], request_id: str) -> Explanation:
    """The last decision on `request_id` among `records`, the first of which has every row of its view.

    Raises NotFoundError.
    """
    view, at_decision, record = ClusterView(), ClusterView(), None
    for later in records:
        view.apply(later.changes, later.version)
        if later.request_id == request_id:
            record, at_decision = later, ClusterView.from_dict(view.to_dict())
    if record is None:
        raise NotFoundError(f"request {request_id!r} is not among the last decisions")
    return explain_record(record.config(config), record, at_decision)


def explain_record(config: ScheduleConfig, record: DecisionRecord, view: ClusterView) -> Explanation:
    """`record` as decided from `view` with `config`."""
    decision = record.decision
    return Explanation(
        request_id=record.request_id,
        outcome=decision.outcome,
        policy=config.policy,
        balancing_threshold=config.balancing_threshold,
        num_tokens=record.request.num_tokens,
        max_tokens=record.request.max_tokens,
        best_blocks=min(record.best, record.request.usable_blocks),
        holder=record.holder,
        retry_after_seconds=decision.retry_after_seconds,
        prefill=_prefill(config, record, view) if view.prefill.rows else [],
        decode=_decode(config, record, view) if view.decode.rows else [],
    )


def _prefill(config: ScheduleConfig, record: DecisionRecord, view: ClusterView) -> list[ConsideredPrefill]:
    request, match, chosen = record.request, record.lengths, record.decision.prefill
    policy = POLICIES[config.policy]
    forecast = forecast_prefill(view.prefill, request, match, config, now=record.now, fetches=policy.fetches)
    takes = open_prefill(view.prefill, request, config)
    score = policy.score(forecast, view.prefill)
    lowest = float(score[takes].min()) if takes.any() else 0.0
    considered = []
    for slot, row in enumerate(view.prefill.rows):
        if not row.name:
            continue
        verdict = _why_no_prefill(row, record, config)
        if takes[slot]:
            verdict = _verdict(slot == chosen, float(score[slot]), lowest, config.policy)
        considered.append(
            ConsideredPrefill(
                name=row.name,
                own_blocks=min(int(match.local[slot]), request.usable_blocks),
                fetches=bool(forecast.fetch[slot]),
                transfer_seconds=float(forecast.transfer_seconds[slot]),
                queue_seconds=float(forecast.queue_seconds[slot]),
                prefill_seconds=float(forecast.prefill_seconds[slot]),
                verdict=verdict,
            )
        )
    return considered


def _decode(config: ScheduleConfig, record: DecisionRecord, view: ClusterView) -> list[ConsideredDecode]:
    takes, load, turns = forecast_decode(view.decode, record.request, config)
    lowest = float(load[takes].min()) if takes.any() else 0.0
    considered = []
    for slot, row in enumerate(view.decode.rows):
        if not row.name:
            continue
        verdict = _why_no_decode(row, record, config)
        if takes[slot]:
            verdict = _verdict(slot == record.decision.decode, float(load[slot]), lowest, "load")
        considered.append(
            ConsideredDecode(
                name=row.name,
                num_requests=row.num_requests,
                kv_tokens=row.kv_tokens,
                tbt_seconds=float(load[slot] / turns[slot]),
                verdict=verdict,
            )
        )
    return considered


def _verdict(is_chosen: bool, score: float, lowest: float, by: str) -> str:
    if is_chosen:
        return "chosen"
    if np.isclose(score, lowest, rtol=1e-12, atol=0.0):
        return "as good; the draw was for another"
    if by in ("load", "random"):
        return "more loaded"
    return f"{score - lowest:.3f} s later"


def _why_no_prefill(row: PrefillRow, record: DecisionRecord, config: ScheduleConfig) -> str:
    if row.max_tokens < record.request.num_tokens:
        return f"holds prompts of up to {row.max_tokens} tokens"
    if row.num_requests >= row.num_slots + config.max_waiting_prompts:
        return f"queue full with {row.num_requests} requests"
    return "avoided: it just failed this request"


def _why_no_decode(row: DecodeRow, record: DecisionRecord, config: ScheduleConfig) -> str:
    longest = min(row.max_tokens, row.capacity_tokens)
    if longest < record.request.total_tokens:
        return f"holds up to {longest} tokens of prompt and answer"
    if row.num_requests >= row.num_slots * config.decode_overcommit:
        return f"full with {row.num_requests} requests"
    if row.committed_tokens + record.request.total_tokens > row.capacity_tokens * config.decode_overcommit:
        return f"KV capacity taken: {row.committed_tokens} of {row.capacity_tokens} tokens committed"
    return "avoided: it just failed this request"


def table(explanation: Explanation) -> str:
    """For people: what was decided, then a line per instance."""
    one = explanation
    lines = [
        f"{one.request_id}: {one.outcome}, policy {one.policy}, threshold {one.balancing_threshold:g}; "
        f"{one.num_tokens} tokens + {one.max_tokens}; best prefix {one.best_blocks} blocks"
        + (f" at {one.holder}" if one.holder else "")
        + (f"; retry after {one.retry_after_seconds:.2f} s" if one.retry_after_seconds else ""),
        f"{'prefill':<20} {'own':>5} {'fetch':>5} {'transfer':>9} {'queue':>9} {'prefill':>9} {'TTFT':>9}  verdict",
    ]
    for p in one.prefill:
        ttft = p.transfer_seconds + p.queue_seconds + p.prefill_seconds
        lines.append(
            f"{p.name:<20} {p.own_blocks:>5} {one.best_blocks if p.fetches else 0:>5} {p.transfer_seconds:>9.4f} "
            f"{p.queue_seconds:>9.4f} {p.prefill_seconds:>9.4f} {ttft:>9.4f}  {p.verdict}"
        )
    lines.append(f"{'decode':<20} {'requests':>11} {'KV tokens':>9} {'TBT':>9}  verdict")
    lines += [
        f"{d.name:<20} {d.num_requests:>11} {d.kv_tokens:>9} {d.tbt_seconds:>9.4f}  {d.verdict}"
        for d in one.decode
    ]
    return "\n".join(lines)

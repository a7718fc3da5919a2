"""KVCache-centric scheduling: Algorithm 1 of the paper (§4.1) as one pure function over arrays.

Line numbers in comments are the paper's. Line 1 (PrefixHash) and line 3 (FindBestPrefixMatch) are done by the
caller and arrive as a `PrefixLengths`; line 21 (TransferKVCache) is `Decision.fetch_blocks`, carried out by
the prefill instance.

Where the paper leaves an edge open:
- `best_len / prefix_len` with prefix_len 0 is infinite for best_len > 0, and 1 when both are 0;
- a threshold of infinity never fetches; no threshold fetches what is already there (best_len <= prefix_len);
- blocks that are booked but not yet computed count for the instance itself, never as a source to fetch from;
- at least one token of the prompt is computed.

Where prose and lines differ, policy `global` follows the lines. The prose adds that the Conductor forwards a request
with the location of its prefix "if the estimated additional prefill time is shorter than the transfer time": read
literally, it would fetch where recomputing is the faster way, which must be a slip. Policy `global_cost` fetches where
the transfer is shorter than the prefill time that it saves, per instance, and needs no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from mooncake_jax.conductor import admission
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, PrefixLengths, RequestFeatures
from mooncake_jax.conductor.estimate import PrefillForecast
from mooncake_jax.conductor.policy import POLICIES, Fetches
from mooncake_jax.conductor.view import ClusterView, DecodeColumns, DecodeRow, PrefillColumns, PrefillRow

_TIED = 1.0 + 1e-9  # scores this close are equal: measured factors differ by rounding errors at least


def schedule(
    view: ClusterView,
    request: RequestFeatures,
    match: PrefixLengths,
    config: ScheduleConfig,
    *,
    now: float,
    draws: tuple[float, float],
) -> Decision:
    """The pair (p, d) for one request, or why there is none. Pure: equal arguments give equal decisions.

    `draws` are two uniform numbers in [0, 1) that break ties among prefill and decode instances.
    `match.local` is `[P]`.
    """
    prefill, decode = view.prefill, view.decode
    if not (prefill.rows and decode.rows):
        return admission.why_closed(view, request, config, now=now, prefill_open=bool(prefill.rows))
    prefill_open = open_prefill(prefill, request, config)
    decode_open, load, turns = forecast_decode(decode, request, config)
    policy = POLICIES[config.policy]
    forecast = forecast_prefill(prefill, request, match, config, now=now, fetches=policy.fetches)  # 4-13
    p = _lowest(policy.score(forecast, prefill), prefill_open, draws[0])  # 14-16
    d = _lowest(load, decode_open, draws[1])  # 17: SelectDecodingInstance
    if p < 0 or d < 0:
        return admission.why_closed(view, request, config, now=now, prefill_open=p >= 0)
    tbt_seconds = load.item(d) / turns.item(d)
    decision = Decision(
        "placed",
        p,
        d,
        min(match.local.item(p), request.usable_blocks),
        min(match.best, request.usable_blocks) if forecast.fetch.item(p) else 0,  # 20-21
        forecast.transfer_seconds.item(p),
        forecast.queue_seconds.item(p),
        forecast.prefill_seconds.item(p),
        tbt_seconds,
    )
    if 0.0 < config.ttft_slo_seconds < decision.ttft_seconds:  # 18-19
        return _refused(decision, "ttft_slo", admission.ttft_retry_seconds(forecast, prefill_open, config))
    if 0.0 < config.tbt_slo_seconds < tbt_seconds:
        return _refused(
            decision, "tbt_slo", admission.tbt_retry_seconds(decode, request, decode_open, config)
        )
    return decision  # 22


def shortest_ttfts(
    view: ClusterView,
    request: RequestFeatures,
    match: PrefixLengths,
    config: ScheduleConfig,
    *,
    thresholds: Sequence[float],
    now: float,
) -> list[float]:
    """What line 15 would come to with each of `thresholds`, under policy `global`; [] when no instance is open."""
    takes = open_prefill(view.prefill, request, config) if view.prefill.rows else np.zeros(0, bool)
    if not takes.any():
        return []
    seconds = []
    for threshold in thresholds:
        with_it = msgspec.structs.replace(config, balancing_threshold=threshold)
        forecast = forecast_prefill(view.prefill, request, match, with_it, now=now, fetches="by_ratio")
        seconds.append(float(forecast.ttft_seconds[takes].min()))
    return seconds


def forecast_prefill(
    prefill: PrefillColumns,
    request: RequestFeatures,
    match: PrefixLengths,
    config: ScheduleConfig,
    *,
    now: float,
    fetches: Fetches,
) -> PrefillForecast:
    """Lines 4-13 for all instances at once, `[P]` each.

    What depends on an instance through its prefix length alone is computed once per length, then looked up.
    """
    cost, usable = config.cost, request.usable_blocks
    best = min(match.best, usable)
    seconds = cost.prefill_seconds_by_blocks(request.num_tokens, request.block_tokens, usable)
    if match.continued:
        seconds[best] = _continued_seconds(seconds, best, match, request, config)
    queue = np.maximum(prefill.busy_until - now, 0.0)  # 12
    num_fetching = _num_fetching(best, fetches, config.balancing_threshold)  # 5: those with fewer blocks
    fetch = match.local < num_fetching
    transfer = _transfer_seconds(match, request, config, best, num_fetching, fetch)
    if fetches == "by_cost" and num_fetching:
        own = seconds.take(match.local, mode="clip") * prefill.factor
        after = seconds[best] * prefill.factor
        fetch &= transfer + after < own
        transfer *= fetch
        spent = np.where(fetch, after, own)
    else:
        seconds[:num_fetching] = seconds[best]  # 6
        spent = seconds.take(match.local, mode="clip") * prefill.factor  # 10, 13
    if match.own_seconds is not None:
        transfer += match.own_seconds
    return PrefillForecast(fetch, transfer, queue, spent, transfer + queue + spent)


def _transfer_seconds(
    match: PrefixLengths,
    request: RequestFeatures,
    config: ScheduleConfig,
    best: int,
    num_fetching: int,
    fetch: np.ndarray,
) -> np.ndarray:
    """`[P]`: of what is missing of the best prefix, where `fetch`; 0 elsewhere (lines 7, 8 and 11)."""
    if num_fetching == 0:
        return np.zeros(fetch.shape)
    link = match.link or config.cost.idle_link
    per_block = link.seconds_per_nbyte * request.block_nbytes
    if isinstance(per_block, np.ndarray) or isinstance(link.start_seconds, np.ndarray):
        return ((best - match.local) * per_block + link.start_seconds) * fetch
    by_length = np.zeros(request.usable_blocks + 1)
    by_length[:num_fetching] = np.arange(best, best - num_fetching, -1)
    by_length[:num_fetching] *= per_block
    by_length[:num_fetching] += link.start_seconds
    return by_length.take(match.local, mode="clip")


def _continued_seconds(
    seconds: np.ndarray, best: int, match: PrefixLengths, request: RequestFeatures, config: ScheduleConfig
) -> float:
    """Of a prompt of which `best` blocks and those that another node continues them with are reused."""
    reused = min(best + match.continued, request.usable_blocks)
    nbytes = (reused - best) * request.block_nbytes
    return min(seconds.item(best), seconds.item(reused) + config.cost.transfer_seconds(nbytes))


def open_prefill(prefill: PrefillColumns, request: RequestFeatures, config: ScheduleConfig) -> np.ndarray:
    """`[P]` bool: alive, long enough for the prompt, and with room in the queue."""
    (room,) = prefill.derived(_derive_prefill, config)
    return admission.without(room >= request.num_tokens, request.avoid_prefill)


def forecast_decode(
    decode: DecodeColumns, request: RequestFeatures, config: ScheduleConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[D]` each: whether it takes the request; its load then, which SelectDecodingInstance minimises; its turns.

    The load is the time between two tokens of a request: a decode step, times the turns that more requests than
    slots have to take. TBT is the step alone: who waits for a slot has no token yet.
    """
    room, load, load_per_token, turns = decode.derived(_derive_decode, config)
    takes = admission.without(room >= request.total_tokens, request.avoid_decode)
    return takes, load + load_per_token * request.num_tokens, turns


def _derive_prefill(row: PrefillRow, config: ScheduleConfig) -> tuple[float]:
    return (admission.prefill_room(row, config),)


def _derive_decode(row: DecodeRow, config: ScheduleConfig) -> tuple[float, float, float, float]:
    joined = row.num_requests + 1
    turns = max(joined / row.num_slots, 1.0)
    step_seconds = config.cost.tbt_seconds(min(joined, row.num_slots), row.kv_tokens) * row.factor
    seconds_per_token = config.cost.tbt_seconds_per_kv_token * row.factor
    return admission.decode_room(row, config), step_seconds * turns, seconds_per_token * turns, turns


def _num_fetching(best: int, fetches: Fetches, threshold: float) -> int:
    """Instances with fewer own blocks than this may fetch `best`: the largest prefix_len of line 5, plus 1."""
    if best == 0 or fetches == "never" or (threshold == math.inf and fetches == "by_ratio"):
        return 0
    if fetches == "by_cost" or threshold <= 1.0:
        return best
    num = int(best / threshold) + 1
    while num > 1 and best / (num - 1) <= threshold:
        num -= 1
    return num


def _lowest(score: np.ndarray, takes: np.ndarray, draw: float) -> int:
    # one of the open instances with the lowest score, rounding errors apart, drawn by `draw`; -1 when none is open
    slots = takes.nonzero()[0]
    if not slots.size:
        return -1
    open_score = score[slots]
    ties = (open_score <= open_score.item(open_score.argmin()) * _TIED).nonzero()[0]
    return slots.item(ties.item(int(draw * ties.size)))


def _refused(decision: Decision, outcome: admission.Outcome, retry_after_seconds: float) -> Decision:
    return Decision(
        outcome,
        transfer_seconds=decision.transfer_seconds,
        queue_seconds=decision.queue_seconds,
        prefill_seconds=decision.prefill_seconds,
        tbt_seconds=decision.tbt_seconds,
        retry_after_seconds=retry_after_seconds,
    )

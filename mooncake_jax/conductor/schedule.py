"""KVCache-centric scheduling: Algorithm 1 of the paper (§4.1) as one pure function over arrays.

Line numbers in comments are the paper's. Line 1 (PrefixHash) and line 3 (FindBestPrefixMatch) are done by the
caller and arrive as a `PrefixLengths`; line 21 (TransferKVCache) is `Decision.fetch_blocks`, carried out by
the prefill instance.

Where the paper leaves an edge open:
- `best_len / prefix_len` with prefix_len 0 is infinite for best_len > 0, and 1 when both are 0;
- a threshold of infinity never fetches; no threshold fetches what is already there (best_len <= prefix_len);
- blocks that are booked but not yet computed count for the instance itself, never as a source to fetch from;
- at least one token of the prompt is computed.
"""

from __future__ import annotations

import math

import numpy as np

from mooncake_jax.conductor import admission
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, PrefixLengths, RequestFeatures
from mooncake_jax.conductor.estimate import PrefillForecast
from mooncake_jax.conductor.policy import POLICIES
from mooncake_jax.conductor.view import ClusterView, DecodeColumns, PrefillColumns


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
    prefill_open = admission.open_prefill(prefill, request, config)
    decode_open = admission.open_decode(decode, request, config)
    policy = POLICIES[config.policy]
    forecast = forecast_prefill(prefill, request, match, config, now=now, fetches=policy.fetches)  # 4-13
    p = _lowest(policy.score(forecast, prefill), prefill_open, draws[0])  # 14-16
    tbt, load = _forecast_decode(decode, request, config)
    d = _lowest(load, decode_open, draws[1])  # 17
    if p < 0 or d < 0:
        return admission.why_closed(view, request, config, now=now, prefill_open=p >= 0)
    tbt_seconds = float(tbt[d])
    fetch = bool(forecast.fetch[p])
    decision = Decision(
        "placed",
        prefill=p,
        decode=d,
        local_blocks=min(int(match.local[p]), request.usable_blocks),
        fetch_blocks=int(forecast.prefix_blocks[p]) if fetch else 0,  # 20-21
        transfer_seconds=float(forecast.transfer_seconds[p]),
        queue_seconds=float(forecast.queue_seconds[p]),
        prefill_seconds=float(forecast.prefill_seconds[p]),
        tbt_seconds=tbt_seconds,
    )
    if 0.0 < config.ttft_slo_seconds < decision.ttft_seconds:  # 18-19
        return _refused(decision, "ttft_slo", admission.ttft_retry_seconds(forecast, prefill_open, config))
    if 0.0 < config.tbt_slo_seconds < tbt_seconds:
        return _refused(
            decision, "tbt_slo", admission.tbt_retry_seconds(decode, request, decode_open, config)
        )
    return decision  # 22


def forecast_prefill(
    prefill: PrefillColumns,
    request: RequestFeatures,
    match: PrefixLengths,
    config: ScheduleConfig,
    *,
    now: float,
    fetches: bool,
) -> PrefillForecast:
    """Lines 4-13 for all instances at once, `[P]` each."""
    cost, threshold = config.cost, config.balancing_threshold
    local = np.minimum(match.local, request.usable_blocks)
    best = min(match.best, request.usable_blocks)
    if fetches and best > 0 and threshold < math.inf:
        fetch = (best > threshold * local) & (best > local)  # 5
        prefix = np.where(fetch, best, local)  # 6, 10
        transfer_nbytes = (best - local) * float(request.block_nbytes)  # 7
        transfer = np.where(fetch, cost.transfer_seconds(transfer_nbytes), 0.0)  # 8, 11
    else:
        fetch = np.zeros(local.shape, bool)
        prefix = local
        transfer = np.zeros(local.shape)
    queue = np.maximum(prefill.busy_until - now, 0.0)  # 12
    num_prefix = prefix * float(request.block_tokens)
    seconds = prefill.factor * cost.prefill_seconds(request.num_tokens, num_prefix)  # 13
    return PrefillForecast(prefix, fetch, transfer, queue, seconds, transfer + queue + seconds)


def _forecast_decode(
    decode: DecodeColumns, request: RequestFeatures, config: ScheduleConfig
) -> tuple[np.ndarray, np.ndarray]:
    # `[D]` token interval after joining, and the load to minimise: what is more than a batch waits in turns
    joined = decode.num_requests + 1
    tbt = config.cost.tbt_seconds(np.minimum(joined, decode.num_slots), decode.kv_tokens + request.num_tokens)
    return tbt, tbt * np.maximum(joined / decode.num_slots, 1.0)


def _lowest(score: np.ndarray, takes: np.ndarray, draw: float) -> int:
    # one of the open instances with the lowest score, drawn by `draw`; -1 when none is open
    if not len(score):
        return -1
    masked = np.where(takes, score, np.inf)
    lowest = masked[masked.argmin()]
    if lowest == np.inf:
        return -1
    ties = (masked == lowest).nonzero()[0]
    return int(ties[int(draw * len(ties))])


def _refused(decision: Decision, outcome: admission.Outcome, retry_after_seconds: float) -> Decision:
    return Decision(
        outcome,
        transfer_seconds=decision.transfer_seconds,
        queue_seconds=decision.queue_seconds,
        prefill_seconds=decision.prefill_seconds,
        tbt_seconds=decision.tbt_seconds,
        retry_after_seconds=retry_after_seconds,
    )

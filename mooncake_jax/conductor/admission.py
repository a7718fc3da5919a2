"""Who may take a request, when to refuse it (429) and for how long: queues, capacity, SLO forecasts."""

from __future__ import annotations

import numpy as np

from kvstore.errors import InvalidError, RefusedError, StoreError, UnavailableError
from mooncake_jax.conductor.config import ScheduleConfig
from mooncake_jax.conductor.decision import Decision, Outcome, RequestFeatures
from mooncake_jax.conductor.estimate import PrefillForecast
from mooncake_jax.conductor.view import ClusterView, DecodeColumns, DecodeRow, PrefillRow


def prefill_room(row: PrefillRow, config: ScheduleConfig) -> int:
    """The longest prompt, in tokens, that this instance takes now; -1: none."""
    if not row.alive or row.num_requests >= row.num_slots + config.max_waiting_prompts:
        return -1
    return row.max_tokens


def decode_room(row: DecodeRow, config: ScheduleConfig) -> float:
    """The most tokens of prompt and answer that this instance takes now; -1: none."""
    if not row.alive or row.num_requests >= row.num_slots * config.decode_overcommit:
        return -1
    free_tokens = row.capacity_tokens * config.decode_overcommit - row.committed_tokens
    return min(row.max_tokens, row.capacity_tokens, free_tokens)


def without(takes: np.ndarray, slots: tuple[int, ...]) -> np.ndarray:
    """`takes` `[N]` without `slots`, unless nothing were left."""
    if not slots:
        return takes
    others = takes.copy()
    others[list(slots)] = False
    return others if others.any() else takes


def why_closed(
    view: ClusterView, request: RequestFeatures, config: ScheduleConfig, *, now: float, prefill_open: bool
) -> Decision:
    """The decision when no prefill instance is open or, with `prefill_open`, no decode instance."""
    prefill, decode = view.prefill, view.decode
    if not prefill.alive.any():
        return Decision("no_prefill")
    if not decode.alive.any():
        return Decision("no_decode")
    prefill_fits = prefill.alive & (prefill.max_tokens >= request.num_tokens)
    decode_fits = decode.alive & (_longest(decode) >= request.total_tokens)
    if not (prefill_fits.any() and decode_fits.any()):
        return Decision("too_long")
    if not prefill_open:
        queue_seconds = np.maximum(prefill.busy_until[prefill_fits] - now, 0.0)
        each = queue_seconds / np.maximum(prefill.num_requests[prefill_fits], 1)
        return Decision("prefill_full", retry_after_seconds=_bounded(float(each.min()), config))
    wait = float(_next_end_seconds(decode, config)[decode_fits].min())
    return Decision("decode_full", retry_after_seconds=_bounded(wait, config))


def ttft_retry_seconds(forecast: PrefillForecast, takes: np.ndarray, config: ScheduleConfig) -> float:
    """Until the shortest TTFT fits its SLO: queues drain a second a second; the rest of a TTFT stays."""
    excess = forecast.ttft_seconds - config.ttft_slo_seconds
    reachable = takes & (excess <= forecast.queue_seconds)
    wait = float(excess[reachable].min()) if reachable.any() else config.max_retry_after_seconds
    return _bounded(wait, config)


def tbt_retry_seconds(
    decode: DecodeColumns, request: RequestFeatures, takes: np.ndarray, config: ScheduleConfig
) -> float:
    """Until some batch shrinks by a request; the longest wait when even an empty batch is too slow."""
    if config.cost.tbt_seconds(1.0, float(request.num_tokens)) > config.tbt_slo_seconds:
        return config.max_retry_after_seconds
    return _bounded(float(_next_end_seconds(decode, config)[takes].min()), config)


def _longest(decode: DecodeColumns) -> np.ndarray:
    return np.minimum(decode.max_tokens, decode.capacity_tokens)


def _next_end_seconds(decode: DecodeColumns, config: ScheduleConfig) -> np.ndarray:
    # b remaining lengths spread evenly over [0, 2 mean]: the first request ends after 2 mean / (b + 1) tokens
    batch = np.maximum(decode.num_requests, 1)
    remaining = np.maximum(decode.committed_tokens - decode.kv_tokens, 0) / batch
    interval = config.cost.tbt_seconds(np.minimum(batch, decode.num_slots), decode.kv_tokens)
    return 2.0 * remaining / (batch + 1) * interval


def _bounded(wait_seconds: float, config: ScheduleConfig) -> float:
    return min(max(wait_seconds, 0.05), config.max_retry_after_seconds)


def refusal(
    decision: Decision, request: RequestFeatures, view: ClusterView, config: ScheduleConfig
) -> StoreError:
    """The error that tells a client of a decision other than `placed`."""
    retry = decision.retry_after_seconds
    messages: dict[Outcome, str] = {
        "ttft_slo": f"TTFT would be {decision.ttft_seconds:.3f} s, limit {config.ttft_slo_seconds:g} s",
        "tbt_slo": f"a token would take {decision.tbt_seconds:.3f} s, limit {config.tbt_slo_seconds:g} s",
        "prefill_full": "every prefill queue is full",
        "decode_full": "no decode instance has a free slot and KV capacity",
    }
    if decision.outcome in messages:
        return RefusedError(f"{messages[decision.outcome]}; try again in {retry:.2f} s", retry)
    if decision.outcome == "too_long":
        longest_prompt = int(view.prefill.max_tokens[view.prefill.alive].max())
        longest_total = int(_longest(view.decode)[view.decode.alive].max())
        return InvalidError(
            f"prompt of {request.num_tokens} tokens + max_tokens {request.max_tokens}: "
            f"the longest prompt here is {longest_prompt} tokens, prompt + max_tokens {longest_total}"
        )
    role = "prefill" if decision.outcome == "no_prefill" else "decode"
    return UnavailableError(f"no {role} instance is alive; start one, or wait until it has registered")

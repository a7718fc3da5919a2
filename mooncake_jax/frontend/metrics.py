"""`/metrics`: this frontend's own counters, and those that the instances send with their heartbeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake_jax.messages import ClusterInfo

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
_MOVED = re.compile(r"(tcp|shm|loopback)_(read|write)")
_NOT_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Metrics:
    """One registry per app, so that several may live in a process."""

    def __init__(self, cluster: Callable[[], ClusterInfo | None]):
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "mooncake_requests", "HTTP requests", ["endpoint", "status"], registry=registry
        )
        self.in_flight = Gauge("mooncake_requests_in_flight", "Generating now", registry=registry)
        self.ttft = Histogram(
            "mooncake_ttft_seconds", "Request to first token", buckets=_SECONDS, registry=registry
        )
        self.tbt = Histogram(
            "mooncake_tbt_seconds", "Between two tokens", buckets=_SECONDS, registry=registry
        )
        self.queue = Histogram(
            "mooncake_prefill_queue_seconds", "Waiting at prefill", buckets=_SECONDS, registry=registry
        )
        self.generated = Counter("mooncake_generated_tokens", "Tokens of answers", registry=registry)
        self._prompt = Counter("mooncake_prompt_tokens", "Tokens of prompts", registry=registry)
        self._cached = Counter(
            "mooncake_cached_tokens", "Prompt tokens whose KV was reused", registry=registry
        )
        self._fetched = Counter("mooncake_fetched_tokens", "Of these, from another node", registry=registry)
        registry.register(_ClusterCollector(cluster))

    def count_prompt(self, tokens: int, cached: int, fetched: int) -> None:
        self._prompt.inc(tokens)
        self._cached.inc(cached)
        self._fetched.inc(fetched)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class _ClusterCollector(Collector):
    """Counters of every live instance; they start again at 0 with an instance, so they are gauges here."""

    def __init__(self, cluster: Callable[[], ClusterInfo | None]):
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        info = self._cluster()
        if info is None:
            return []
        ready = GaugeMetricFamily("mooncake_cluster_ready", "1 if requests can be placed")
        ready.add_metric([], float(info.ready))
        bookings = GaugeMetricFamily("mooncake_bookings", "Bookings that the Conductor holds")
        bookings.add_metric([], info.num_bookings)
        moved = GaugeMetricFamily(
            "mooncake_moved_bytes", "Bytes moved", labels=["instance", "role", "path", "operation"]
        )
        roles = {instance.instance.name: instance.role for instance in info.instances}
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in info.metrics.items():
            clean = "mooncake_conductor_" + _NOT_NAME.sub("_", name)
            families[clean] = GaugeMetricFamily(clean, f"{name} of the Conductor", value=value)
        for load in info.loads:
            role = roles.get(load.name, "")
            books = {
                "used_slots": load.used_slots,
                "queued_tokens": load.queued_tokens,
                "kv_tokens": load.kv_tokens,
                "tokens_per_second": load.tokens_per_second,
            }
            for name, value in (load.counters | books).items():
                if match := _MOVED.fullmatch(name):
                    moved.add_metric([load.name, role, *match.groups()], value)
                    continue
                clean = "mooncake_instance_" + _NOT_NAME.sub("_", name)
                family = families.setdefault(
                    clean, GaugeMetricFamily(clean, f"{name} of an instance", labels=["instance", "role"])
                )
                family.add_metric([load.name, role], value)
        return [ready, bookings, moved, *families.values()]

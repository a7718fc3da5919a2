"""A store node's books for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.node.node import Node
from kvstore.transfer import TransferEngine

_COUNTERS = frozenset(
    [
        "evicted",
        "hit",
        "missed",
        "corrupt",
        "ssd_spilled",
        "ssd_read",
        "ssd_damaged",
        "ssd_evicted",
        "ssd_failed",
        "ssd_skipped",
    ]
)


class MetricsServer:
    """`GET /metrics` of one node and its transfer engine, until `close`."""

    def __init__(self, node: Node, engine: TransferEngine, *, host: str = "127.0.0.1", port: int = 0):
        """Raises OSError when the address is taken."""
        registry = CollectorRegistry()
        registry.register(_NodeCollector(node, engine))
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _NodeCollector(Collector):
    def __init__(self, node: Node, engine: TransferEngine):
        self._node, self._engine = node, engine

    def collect(self) -> Iterable[Metric]:
        labels = ["node"]
        for name, value in self._node.stats().items():
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            family = kind(f"mooncake_store_{name}", f"Store node: {name.replace('_', ' ')}", labels=labels)
            family.add_metric([self._node.name], value)
            yield family
        moved = CounterMetricFamily(
            "mooncake_store_transfer",
            "Bytes that this process asked to move; requests that failed",
            labels=["node", "path"],
        )
        for path, value in self._engine.counters().items():
            moved.add_metric([self._node.name, path], value)
        yield moved

"""What the cluster tells of itself comes out of /metrics."""

from mooncake_jax.frontend.metrics import Metrics
from mooncake_jax.messages import ClusterInfo


def test_the_conductors_metrics_are_exported():
    figures = {"forecast_ttft_error_p95": 0.25, "kvcache_balancing_threshold": float("inf")}
    text = Metrics(lambda: ClusterInfo(True, [], [], 3, figures)).render().decode()
    assert "mooncake_conductor_forecast_ttft_error_p95 0.25" in text
    assert "mooncake_conductor_kvcache_balancing_threshold +Inf" in text
    assert "mooncake_bookings 3.0" in text

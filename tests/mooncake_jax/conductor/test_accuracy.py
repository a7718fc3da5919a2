"""Forecast errors by hand."""

import pytest

from mooncake_jax.conductor.accuracy import Accuracy


def test_errors_are_relative_to_what_was_measured():
    accuracy = Accuracy()
    assert accuracy.summary() == {}
    for forecast in (1.0, 2.0, 3.0):
        accuracy.add("ttft", forecast_seconds=forecast, measured_seconds=2.0)
    accuracy.add("ttft", forecast_seconds=0.0, measured_seconds=2.0)
    accuracy.add("tbt", forecast_seconds=1.0, measured_seconds=float("inf"))
    assert accuracy.summary() == {
        "forecast_ttft_count": 3.0,
        "forecast_ttft_ratio_p50": 1.0,
        "forecast_ttft_error_p50": 0.5,
        "forecast_ttft_error_p95": pytest.approx(0.5),
    }


def test_only_the_last_ones_count():
    accuracy = Accuracy()
    for forecast in [9.0] * 600 + [1.0] * 512:
        accuracy.add("prefill", forecast_seconds=forecast, measured_seconds=1.0)
    assert accuracy.summary()["forecast_prefill_count"] == 1112.0
    assert accuracy.summary()["forecast_prefill_error_p95"] == 0.0

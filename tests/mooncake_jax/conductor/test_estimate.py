"""Estimators by hand, and the bounds of the online correction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.conductor.estimate import FACTOR_BOUNDS, CostModel, busy_until, corrected


def test_prefill_counts_tokens_pairs_and_reused_tokens():
    cost = CostModel(
        prefill_base_seconds=1.0,
        prefill_seconds_per_token=0.1,
        prefill_seconds_per_pair=0.01,
        prefill_seconds_per_prefix_token=0.001,
    )
    # 6 new tokens after 4: pairs 6 * 4 + 6 * 6 / 2 = 42
    assert cost.prefill_seconds(10, 4.0) == pytest.approx(1.0 + 0.6 + 0.42 + 0.004)
    assert cost.prefill_seconds(10, np.array([0.0, 4.0])) == pytest.approx([1.0 + 1.0 + 0.5, 2.024])


def test_the_papers_prefill_times_fit():
    cost = CostModel(
        prefill_base_seconds=0.071,
        prefill_seconds_per_token=101.5e-6,
        prefill_seconds_per_pair=2 * 964e-12,
        prefill_seconds_per_prefix_token=0.0,
    )
    for num_tokens, seconds in ((8192, 0.93), (32768, 4.4), (131072, 27.6)):  # Figure 14, nothing cached
        assert cost.prefill_seconds(num_tokens, 0.0) == pytest.approx(seconds, rel=0.1)


def test_transfer_queue_and_interval():
    cost = CostModel(
        transfer_base_seconds=0.5, transfer_nbytes_per_second=100.0, prefill_seconds_per_token=0.01
    )
    assert cost.transfer_seconds(50.0) == pytest.approx(1.0)
    assert cost.queue_seconds(100, 50.0, factor=9.0) == pytest.approx(2.0)
    assert cost.queue_seconds(100, 0.0, factor=2.0) == pytest.approx(2.0)
    assert cost.queue_seconds(0, 0.0, factor=2.0) == 0.0
    cost = CostModel(tbt_base_seconds=0.1, tbt_seconds_per_request=0.01, tbt_seconds_per_kv_token=0.001)
    assert cost.tbt_seconds(3, 20) == pytest.approx(0.15)


def test_a_queue_goes_on_from_its_report_booking_by_booking():
    assert busy_until(10.0, 2.0, []) == 12.0
    assert busy_until(10.0, 2.0, [(9.0, 1.0), (11.0, 1.0)]) == 14.0
    assert busy_until(10.0, 0.0, [(15.0, 1.0), (15.5, 1.0), (30.0, 1.0)]) == 31.0
    assert (
        busy_until(10.0, 0.0, [(10.1, 1.0), (10.2, 1.0)], served_at=11.0) == 13.0
    )  # a third one before them
    assert busy_until(10.0, 3.0, [(10.1, 1.0)], served_at=11.0) == 14.0


times = st.floats(1e-6, 1e6)


@given(factor=st.floats(*FACTOR_BOUNDS), forecast=times, measured=times)
def test_a_correction_goes_the_right_way_and_not_far(factor, forecast, measured):
    after = corrected(factor, forecast_seconds=forecast, measured_seconds=measured)
    assert FACTOR_BOUNDS[0] <= after <= FACTOR_BOUNDS[1]
    assert (after - factor) * (measured - forecast) >= 0
    assert 4**-0.1 / 1.0001 <= after / factor <= 4**0.1 * 1.0001


@pytest.mark.parametrize(("forecast", "measured"), [(0.0, 1.0), (1.0, 0.0), (1.0, float("inf"))])
def test_nothing_is_learnt_from_nothing(forecast, measured):
    assert corrected(2.0, forecast_seconds=forecast, measured_seconds=measured) == 2.0


def test_a_queue_is_the_sum_of_what_is_known_and_a_rate_for_the_rest():
    cost = CostModel(prefill_seconds_per_token=0.01)
    booked = [(100, 3.0), (300, 5.0)]
    assert cost.queue_seconds(400, 50.0, 1.0, booked) == pytest.approx(8.0)
    assert cost.queue_seconds(100, 50.0, 1.0, booked) == pytest.approx(2.0)  # three quarters are done
    assert cost.queue_seconds(500, 50.0, 1.0, booked) == pytest.approx(8.0 + 2.0)  # 100 of another Conductor
    assert cost.queue_seconds(500, 0.0, 2.0, booked) == pytest.approx(8.0 + 2.0)
    assert cost.queue_seconds(0, 50.0, 1.0, booked) == 0.0


def test_a_slowed_model_computes_slower_and_moves_bytes_as_before():
    cost = CostModel()
    slow = cost.slowed(3.0)
    assert slow.prefill_seconds(1000, 100.0) == pytest.approx(3 * cost.prefill_seconds(1000, 100.0))
    assert slow.tbt_seconds(4, 1000) == pytest.approx(3 * cost.tbt_seconds(4, 1000))
    assert slow.transfer_seconds(1e6) == cost.transfer_seconds(1e6)

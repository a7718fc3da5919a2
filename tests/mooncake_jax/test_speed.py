"""The moving average of a worker's speed."""

import pytest

from mooncake_jax.speed import Speed


def test_speed_follows_the_newest_work():
    speed = Speed()
    assert speed.tokens_per_second == 0.0
    speed.add(100, 1.0)
    assert speed.tokens_per_second == pytest.approx(100)
    for _ in range(50):
        speed.add(400, 1.0)
    assert speed.tokens_per_second == pytest.approx(400, rel=0.01)


def test_work_that_takes_no_time_is_no_division_by_zero():
    speed = Speed()
    speed.add(5, 0.0)
    assert speed.tokens_per_second == 0.0

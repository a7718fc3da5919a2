"""What pairs of nodes achieved, how it is forgotten, and what a sender has in flight."""

import numpy as np
import pytest

from mooncake_jax.conductor.estimate import CostModel
from mooncake_jax.conductor.links import Links

COST = CostModel(transfer_base_seconds=0.1, transfer_nbytes_per_second=1000.0)


def test_an_idle_link_that_nobody_measured_is_the_models():
    assert Links(COST).link("n", ["a", "b"], 0.0, now=0.0) is None


def test_what_is_in_flight_goes_first():
    link = Links(COST).link("n", ["a"], 500.0, now=0.0)
    assert link is not None
    assert link.start_seconds == pytest.approx(0.6)
    assert link.seconds_per_nbyte == pytest.approx(1e-3)


def test_a_pair_is_as_fast_as_it_was_and_forgotten_slowly():
    links = Links(COST)
    links.learn("n", "a", nbytes=900, seconds=3.6, now=0.0)  # forecast: 0.1 s and 0.9 s
    link = links.link("n", ["a", "b"], 0.0, now=0.0)
    assert link is not None
    assert np.asarray(link.seconds_per_nbyte) == pytest.approx([4e-3, 1e-3])
    assert links.forecast_seconds("n", "a", 900, now=0.0) == pytest.approx(3.7)
    assert links.forecast_seconds("n", "a", 900, now=1e6) == pytest.approx(1.0)
    links.learn("n", "a", nbytes=900, seconds=0.9, now=0.0)
    assert links.forecast_seconds("n", "a", 900, now=0.0) == pytest.approx(0.1 + 0.9 * 4.0**0.7)
    assert links.link("other", ["a"], 0.0, now=0.0) is None
    links.forget("a")
    assert links.forecast_seconds("n", "a", 900, now=0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (900, 0.0), (900, float("inf")), (90, 5.0)])
def test_nothing_is_learnt_from_nothing_nor_from_what_starting_hides(nbytes, seconds):
    links = Links(COST)
    links.learn("n", "a", nbytes=nbytes, seconds=seconds, now=0.0)
    assert links.link("n", ["a"], 0.0, now=0.0) is None


def test_one_outlier_moves_a_pair_no_further_than_the_bound():
    links = Links(COST)
    links.learn("n", "a", nbytes=900, seconds=1e9, now=0.0)
    assert links.forecast_seconds("n", "a", 900, now=0.0) == pytest.approx(0.1 + 0.9 * 256.0)


def test_blocks_on_ssd_are_read_before_they_leave():
    cost = CostModel(
        transfer_base_seconds=0.1, transfer_nbytes_per_second=1000.0, ssd_nbytes_per_second=100.0
    )
    links = Links(cost)
    link = links.link("n", ["a"], 0.0, now=0.0, ssd_nbytes=50.0)
    assert link is not None
    assert link.start_seconds == pytest.approx(0.6)
    links.learn("n", "a", nbytes=900, seconds=0.9, now=0.0)
    link = links.link("n", ["a"], 500.0, now=0.0, ssd_nbytes=50.0)
    assert link is not None
    assert link.start_seconds == pytest.approx(1.1)

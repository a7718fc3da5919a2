"""The allocator of staging memory against a byte map."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_jax.decode.regions import Regions

PAGE = 16


@given(st.lists(st.integers(-10, 100), max_size=60))
@settings(max_examples=100, deadline=None)
def test_regions_are_aligned_disjoint_first_fit_and_come_back(steps):
    regions, taken = Regions(20 * PAGE, PAGE), {}
    for step in steps:
        if step > 0:
            start = regions.take(step)
            pages = -(-step // PAGE)
            used = {page for first, count in taken.items() for page in range(first, first + count)}
            holes = [p for p in range(21 - pages) if not used & set(range(p, p + pages))]
            assert start == (holes[0] * PAGE if holes else None)
            if start is not None:
                taken[start // PAGE] = pages
        elif taken:
            first = sorted(taken)[-step % len(taken)]
            regions.give_back(first * PAGE)
            del taken[first]
        assert regions.used_nbytes == PAGE * sum(taken.values())
    for first in taken:
        regions.give_back(first * PAGE)
    assert regions.take(20 * PAGE) == 0, "free regions did not merge"


def test_what_cannot_be():
    regions = Regions(100, PAGE)
    assert regions.nbytes == 96
    assert (regions.fits(96), regions.fits(97), regions.fits(0)) == (True, False, False)
    with pytest.raises(KeyError):
        regions.give_back(0)
    with pytest.raises(ValueError, match="a region of 0 bytes"):
        regions.take(0)
    with pytest.raises(ValueError, match="do not hold one region"):
        Regions(8, PAGE)

"""Copies inside a process: every byte arrives, and crcs are those of what arrived."""

import threading
import zlib

import numpy as np
import pytest

from kvstore.client.copier import Copier


@pytest.fixture
def copier():
    before = set(threading.enumerate())
    copier = Copier()
    yield copier
    copier.close()
    copier.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("nbytes", [1, 4096, 40_000, 700_001])
def test_copies_arrive_with_the_crcs_of_their_parts(copier, nbytes):
    sources = np.random.default_rng(0).integers(0, 256, (5, nbytes), np.uint8)
    targets, others = np.zeros_like(sources), np.zeros_like(sources)
    part = max(1, nbytes // 3)

    copier.copy([(to.data, source.data) for to, source in zip(targets, sources, strict=True)])
    crcs = copier.copy_parts(
        [(to.data, source.data) for to, source in zip(others, sources, strict=True)], part
    )

    assert np.array_equal(targets, sources)
    assert np.array_equal(others, sources)
    assert crcs == [
        tuple(zlib.crc32(source[start : start + part]) for start in range(0, nbytes, part))
        for source in sources
    ]


def test_nothing_to_copy(copier):
    copier.copy([])
    assert copier.copy_parts([], 1) == []

"""Copies inside a process: every byte arrives."""

import threading

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
def test_every_byte_arrives(copier, nbytes):
    sources = np.random.default_rng(0).integers(0, 256, (5, nbytes), np.uint8)
    targets = np.zeros_like(sources)
    copier.copy([(to.data, source.data) for to, source in zip(targets, sources, strict=True)])
    assert np.array_equal(targets, sources)


def test_nothing_to_copy(copier):
    copier.copy([])

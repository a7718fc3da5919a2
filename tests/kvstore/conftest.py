"""A small cluster in one process, closed and checked at the end of each test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from fakes.stores import Cluster, wait_until


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    before = set(threading.enumerate())
    cluster = Cluster()
    yield cluster
    cluster.close()
    wait_until(lambda: set(threading.enumerate()) <= before)  # gRPC's own threads end a little later


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """`eventually(condition)` waits until it holds, and fails if it does not in time."""
    return wait_until

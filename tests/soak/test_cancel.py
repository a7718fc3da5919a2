"""Case 9 for `SOAK_SECONDS`: clients that leave at random moments, hundreds at a time."""

import os
import time

import pytest
from e2e.cluster import LocalCluster
from e2e.http_frontend import cancel_many

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_clients_that_leave_for_a_while():
    deadline, rounds = time.monotonic() + SECONDS, 0
    with LocalCluster() as cluster:
        while rounds == 0 or time.monotonic() < deadline:
            cancel_many(cluster, 500, seed=rounds)
            rounds += 1

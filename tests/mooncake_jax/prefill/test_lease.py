"""How long prefill may write to lent memory: three quarters of the lease, from the last KV that arrived."""

import pytest

from kvstore.errors import UnavailableError
from kvstore.transfer.segment import Peer, Segment
from mooncake_jax.prefill.lease import StagingLease
from mooncake_jax.request import StagingHandle

SEGMENT = Segment(Peer(1, "here", []), "staging", 4096)
HANDLE = StagingHandle("decode-0", 7, 0, 1, SEGMENT, offset=0, num_blocks=1, lease_seconds=60.0)


def test_the_last_quarter_of_a_lease_is_not_used():
    lease = StagingLease(HANDLE, 100.0)
    lease.check(145.0)
    with pytest.raises(UnavailableError, match=r"no KV was written for 45\.1 s .* 'decode-0' lends for 60 s"):
        lease.check(145.1)


def test_kv_that_arrived_renews_it():
    lease = StagingLease(HANDLE, 100.0)
    lease.renew(140.0)
    lease.check(185.0)
    with pytest.raises(UnavailableError, match="reserve again"):
        lease.check(185.1)

"""How long a prefill instance may write to the staging memory that decode lent to a request. Pure."""

from __future__ import annotations

from kvstore.errors import UnavailableError
from mooncake_jax.request import StagingHandle

# The last part of a lease is not used: a write that began before it has ended, or timed out, when decode
# lends the memory to another prompt.
_MARGIN = 0.25


class StagingLease:
    """One handle, from its receipt through all streams of its request; times are on the caller's clock."""

    def __init__(self, handle: StagingHandle, received_seconds: float):
        self.handle = handle
        self._usable_seconds = (1.0 - _MARGIN) * handle.lease_seconds
        self._renewed = received_seconds

    def renew(self, now_seconds: float) -> None:
        """KV has arrived whose flags were sent at `now_seconds`: decode's lease begins anew with them."""
        self._renewed = now_seconds

    def check(self, now_seconds: float) -> None:
        """Raises UnavailableError when the memory may soon be another prompt's: nothing may be written."""
        idle = now_seconds - self._renewed
        if idle > self._usable_seconds:
            handle = self.handle
            raise UnavailableError(
                f"no KV was written for {idle:.1f} s to staging memory that {handle.instance!r} lends for"
                f" {handle.lease_seconds:g} s: it may be another prompt's soon, reserve again"
            )

"""NICs with congestion at both ends."""

from __future__ import annotations

from collections.abc import Sequence


class Network:
    """Full-duplex NICs, each end first come first served.

    A transfer waits for its sender, and its bytes then for the receiver, who takes them in while others are sent.
    The ends are not reserved together: a sender whose receiver is busy goes on with its next transfer, as
    with buffers between them. So convoys do not form, and a transfer needs no event of its own.
    """

    def __init__(self, nbytes_per_second: Sequence[float], base_seconds: float):
        """`nbytes_per_second` of each node's NICs."""
        self._rates = list(nbytes_per_second)
        self._base = base_seconds
        self._sends_until = [0.0] * len(self._rates)
        self._takes_until = [0.0] * len(self._rates)
        self.sent_nbytes = 0.0

    def send(self, source: int, target: int, nbytes: float, now: float) -> float:
        """When `nbytes` from `source` will be at `target`."""
        start = max(now + self._base, self._sends_until[source])
        sent = start + nbytes / self._rates[source]
        taken = max(start, self._takes_until[target]) + nbytes / self._rates[target]
        self._sends_until[source] = sent
        self._takes_until[target] = taken = max(sent, taken)
        self.sent_nbytes += nbytes
        return taken

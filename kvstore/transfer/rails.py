"""Which rail carries the next bytes: pure decisions on health, affinity and load. Times are monotonic seconds.

A rail is one network address of a peer. Rails that failed are avoided for a cooldown, then probed, and used
again when the probe has come through (paper, section 4: a failed resource is temporarily avoided).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COOLDOWN_SECONDS = 1.0
MAX_COOLDOWN_SECONDS = 16.0


@dataclass(slots=True)
class Health:
    """Whether a rail is usable, avoided, or being probed. The cooldown doubles with each failure in a row."""

    num_failures: int = 0
    avoided_until: float = 0.0
    is_probing: bool = False

    @property
    def is_usable(self) -> bool:
        return not self.num_failures

    def wants_probe(self, now: float) -> bool:
        """Whether its cooldown is over and nobody has looked yet."""
        return not self.is_usable and not self.is_probing and now >= self.avoided_until

    def fail(self, now: float) -> None:
        """Avoid it from now on. What else fails during the cooldown is the same failure."""
        if not self.is_usable and not self.is_probing and now < self.avoided_until:
            return
        self.num_failures += 1
        self.is_probing = False
        cooldown = min(MAX_COOLDOWN_SECONDS, COOLDOWN_SECONDS * 2 ** min(self.num_failures - 1, 10))
        self.avoided_until = now + cooldown

    def recover(self) -> None:
        """It works: use it."""
        self.num_failures, self.is_probing = 0, False


class Candidate(NamedTuple):
    """A rail as the frame to be placed sees it."""

    rank: int  # lower is nearer to the memory, at both ends
    nbytes_in_flight: int
    is_usable: bool
    has_room: bool  # for one more frame now
    was_tried: bool  # it broke under this frame


class Verdict(enum.Enum):
    WAIT = enum.auto()  # the rails to use are full
    NOWHERE = enum.auto()  # every rail is avoided, and broke under this frame


def choose(candidates: Sequence[Candidate]) -> int | Verdict:
    """The index of the rail to take: of the nearest usable ones, the one with the fewest bytes in flight.

    A farther rail is taken when no nearer one is usable, not when the nearer ones are busy. If none is usable,
    the frame itself finds out whether one that has not broken under it works again.
    """
    eligible = [i for i, each in enumerate(candidates) if each.is_usable]
    eligible = eligible or [i for i, each in enumerate(candidates) if not each.was_tried]
    if not eligible:
        return Verdict.NOWHERE
    nearest = min(candidates[i].rank for i in eligible)
    free = [i for i in eligible if candidates[i].rank == nearest and candidates[i].has_room]
    return min(free, key=lambda i: candidates[i].nbytes_in_flight) if free else Verdict.WAIT

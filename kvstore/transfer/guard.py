"""Who may write into registered memory: its owner's word on every write, before and while the bytes arrive."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np


class WriteGuard(Protocol):
    """Admits the writes into one segment; called from many threads.

    Without one, a write can land at any time after it was sent: its bytes may wait in a socket while the
    writer gives up. Guarded memory is written through its owner only, never through a mapping of its file: a
    process that is stopped in the middle of a copy may finish it at any later time, and nobody can tell.
    """

    def admit(self, permit: int, offsets: np.ndarray, lengths: np.ndarray) -> AbstractContextManager[float]:
        """Held from before the first byte of a write moves until none of it can move any more.

        `permit` is what the request carries, 0 if nothing; `offsets` and `lengths`, int64 `[M]`, are its
        ranges, which may lie out of bounds. Gives the monotonic time by which the bytes must have arrived:
        then the owner cuts the connection. Raises TransferError, on entering, for a write that may not be; on
        leaving nothing.
        """
        ...

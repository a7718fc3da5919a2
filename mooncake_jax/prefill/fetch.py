"""Reads prefix blocks of another node into home slots, layer group by layer group, ahead of the compute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.block import BlockFormat
from kvstore.client import Client
from kvstore.errors import StoreError
from kvstore.node import Lease, Node, Reservation
from kvstore.transfer.status import TransferError
from mooncake_jax.prefill.fetch_times import FetchTimes

log = logging.getLogger(__name__)


class PrefixLostError(Exception):
    """Reused blocks did not arrive after the compute had begun: the request must start again without them."""


class Fetch:
    """One background read. It begins at once; what arrives is committed at home, so that hot blocks spread.

    A block for which the home node has no slot is read into private memory instead. Any failure ends the
    fetch; what it could not bring is recomputed.
    """

    def __init__(
        self,
        home: Node,
        client: Client,
        block_format: BlockFormat,
        keys: Sequence[bytes],
        node_name: str,
        on_progress: Callable[[], None],
        times: FetchTimes,
    ):
        self._times = times
        self._home, self._client, self._format = home, client, block_format
        self._keys, self._node_name = list(keys), node_name
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._buffers: list[memoryview] = []
        self._groups_here = 0
        self._done = self._over = self._stopped = False
        self._lease: Lease | None = None  # at home, of what was committed
        self._thread = threading.Thread(target=self._run, name="prefix-fetch")
        self._thread.start()

    @property
    def num_blocks(self) -> int:
        """Leading blocks of `keys` that arrive; known with the first group."""
        return len(self._buffers)

    @property
    def is_over(self) -> bool:
        """It has ended, well or not."""
        return self._over

    @property
    def is_usable(self) -> bool:
        """The first group is here, and nothing has failed."""
        with self._changed:
            return self._groups_here > 0 and (self._done or not self._over)

    def wait_group(self, group: int) -> None:
        """Returns when `group` of every block is here. Raises PrefixLostError if it will not come."""
        last = group == self._format.num_groups - 1
        with self._changed:
            self._changed.wait_for(lambda: self._over or (self._groups_here > group and not last))
            if self._over and not self._done:
                raise PrefixLostError(
                    f"prefix blocks of node {self._node_name!r}: layer group {group} did not arrive"
                )

    def block(self, index: int) -> memoryview:
        """The bytes of a fetched block, `[BlockFormat.nbytes]`; whole once the last group has been waited for."""
        return self._buffers[index]

    def stop(self) -> None:
        """Ends it after the read under way; who waits for a group gets PrefixLostError."""
        with self._changed:
            self._stopped = True

    def close(self) -> None:
        """Stops, waits for the read under way, and gives the blocks back to the home node's eviction."""
        self.stop()
        self._thread.join()
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _run(self) -> None:
        done = False
        try:
            done = self._fetch()
        except (StoreError, TransferError) as error:
            log.warning("prefix blocks not fetched from node %r: %s", self._node_name, error)
        except Exception:
            log.exception("prefix blocks not fetched from node %r", self._node_name)
        finally:
            with self._changed:
                self._done, self._over = done, True
                self._changed.notify_all()
            self._on_progress()

    def _fetch(self) -> bool:
        f = self._format
        with self._client.lease(self._keys, self._node_name) as there:
            count = next((i for i, held in enumerate(there.held) if not held), len(self._keys))
            if not count:
                return False
            with self._home.reserve(self._keys[:count], f.nbytes, f.group_nbytes) as slots:
                buffers = [self._buffer(slots, i) for i in range(count)]
                began = time.monotonic()
                for group in range(f.num_groups):
                    start, stop = f.group_offset(group), f.group_offset(group) + f.group_nbytes
                    there.read(
                        range(count), start, f.group_nbytes, [buffer[start:stop] for buffer in buffers]
                    )
                    with self._changed:
                        if self._stopped:
                            return False
                        self._buffers, self._groups_here = buffers, group + 1
                        self._changed.notify_all()
                    self._on_progress()
                self._times.add(self._node_name, count * f.nbytes, time.monotonic() - began)
                return self._keep(slots, buffers, [there.crcs(i, f.group_nbytes) for i in range(count)])

    def _buffer(self, slots: Reservation, index: int) -> memoryview:
        return slots.buffer(index) if slots.accepted[index] else np.empty(self._format.nbytes, np.uint8).data

    def _keep(self, slots: Reservation, buffers: list[memoryview], crcs: list[Sequence[int] | None]) -> bool:
        """Commits what has arrived and leases it at once; from now on it is read through the lease.

        False if a block was evicted in between: its bytes may be another's by now.
        """
        kept = [i for i, accepted in enumerate(slots.accepted) if accepted]
        for i in kept:
            slots.commit(i, crcs[i])
        self._lease = self._home.lease([self._keys[i] for i in kept])
        if not all(self._lease.held):
            return False
        for place, i in enumerate(kept):
            buffers[i] = self._lease.view(place)
        return True

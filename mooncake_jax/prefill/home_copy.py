"""Blocks of one prompt under write at the home node; each is committed when all its layer groups are in."""

from __future__ import annotations

import logging

import numpy as np

from kvstore.block import BlockFormat
from kvstore.errors import StoreError
from kvstore.node import Node, Reservation

log = logging.getLogger(__name__)


class HomeCopy:
    """Slots for the full blocks that a prompt has yet to compute.

    Blocks that found no slot are skipped in silence: the home node has them already, another request writes
    them, or there is no room.
    """

    def __init__(self, home: Node, block_format: BlockFormat, keys: list[bytes], first_block: int):
        """Reserves slots for `keys`, those of blocks `first_block`, `first_block + 1`, …"""
        self._format = block_format
        self._first_block = first_block
        self._reservation: Reservation | None = None
        self._crcs: dict[int, dict[int, int]] = {}  # block: {group: crc32}
        if keys:
            reservation = home.reserve(keys, block_format.nbytes, block_format.group_nbytes)
            self._reservation = reservation
            self._crcs = {first_block + i: {} for i, yes in enumerate(reservation.accepted) if yes}

    def write(self, block: int, group: int, data: np.ndarray, crc: int) -> None:
        """Copies one layer group (`data`: its bytes, uint8) of `block`.

        A block that fails to commit is given up.
        """
        crcs = self._crcs.get(block)
        if crcs is None or self._reservation is None:
            return
        index, f = block - self._first_block, self._format
        try:
            slot = np.frombuffer(self._reservation.buffer(index), np.uint8)
            slot[f.group_offset(group) : f.group_offset(group) + f.group_nbytes] = data
            crcs[group] = crc
            if len(crcs) == f.num_groups:
                del self._crcs[block]
                self._reservation.commit(index, [crcs[g] for g in range(f.num_groups)])
        except StoreError as error:
            self._crcs.pop(block, None)
            log.warning("block %d not kept at the home node: %s", block, error)

    def close(self) -> None:
        """Frees the slots that were not committed."""
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

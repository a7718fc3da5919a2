"""A store node: DRAM slots in shared memory, and SSD below, in every engine process or alone (paper §3)."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.arguments import check_keys, check_namespace
from kvstore.errors import InvalidError
from kvstore.messages import NODE, NodeInfo
from kvstore.node.announcer import Announcer
from kvstore.node.checksummer import Checksummer
from kvstore.node.handles import Lease, Reservation
from kvstore.node.service import NodeService
from kvstore.node.spiller import Spiller
from kvstore.node.ssd import SsdTier, num_ssd_slots
from kvstore.node.store import SlotLayout, SlotStore
from kvstore.node.tiered import TieredStore
from kvstore.rpc import Service
from kvstore.transfer import TransferEngine, TransferError
from kvstore.transfer.transport.shm import SharedBuffer

_UNREGISTER_SECONDS = 2.0  # for reads by others that are under way at close
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeConfig:
    """`dram_nbytes` is for the slots; one object of up to `slot_nbytes` takes one slot.

    `lease_seconds` is how long a client elsewhere may read or write before it must be done. With `ssd_path`,
    a folder of this node's own, there is an SSD tier, which never takes more than `ssd_nbytes` of disk.
    `namespace` is that of objects put in this process, unless the put says another.
    """

    name: str
    host_id: str
    dram_nbytes: int
    slot_nbytes: int
    lease_seconds: float = 10.0
    ssd_path: str = ""
    ssd_nbytes: int = 0
    namespace: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,80}", self.name):
            raise InvalidError(
                f"node name {self.name!r}: expected 1 to 80 letters, digits, dots, dashes, underscores"
            )
        check_namespace(self.namespace)
        if not 0 < self.lease_seconds <= 3600:
            raise InvalidError(f"lease_seconds must be above 0 and at most 3600, got {self.lease_seconds}")
        SlotLayout.fitting(self.dram_nbytes, self.slot_nbytes)
        if bool(self.ssd_path) != bool(self.ssd_nbytes):
            raise InvalidError(f"give both or none: {self.ssd_path=}, {self.ssd_nbytes=}")
        if self.ssd_path:
            num_ssd_slots(self.ssd_nbytes, self.slot_nbytes)


class Node:
    """Owns one shared buffer of slots, registered on `engine`, and the SSD tier below it.

    The verbs here are the Node service's, in process.

    `keys` are 16-byte block keys. Every verb raises UnavailableError after `close`.
    """

    def __init__(self, config: NodeConfig, engine: TransferEngine):
        """Raises OSError without the memory, InvalidError when another node uses the SSD folder.

        A disk that cannot be used is logged, and the node goes without.
        """
        self.config = config
        self.epoch = secrets.randbits(62)
        self._engine = engine
        layout = SlotLayout.fitting(config.dram_nbytes, config.slot_nbytes)
        self._ssd = _open_ssd(config)
        try:
            self._buffer = SharedBuffer(f"{config.name}-slots", layout.nbytes)
        except BaseException:
            if self._ssd is not None:
                self._ssd.close()
            raise
        self._segment_name = f"slots/{config.name}/{self.epoch:x}"
        self._store: SlotStore
        self._spiller: Spiller | None = None
        if self._ssd is None:
            self._store = SlotStore(self._buffer.array, layout)
        else:
            self._store = tiered = TieredStore(self._buffer.array, layout, self._ssd)
            self._spiller = Spiller(tiered, self._ssd, config.name)
        self._checksummer = Checksummer(self._store, config.name)
        self.segment = engine.register_local_memory(
            self._buffer.array, name=self._segment_name, shm_path=self._buffer.path, guard=self._store
        )
        self._announcer: Announcer | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def slots(self) -> np.ndarray | None:
        """The memory of all slots, uint8 `[slots, slot_nbytes]`; None where slots are padded. To read what is leased."""
        layout = self._store.layout
        if layout.stride != layout.slot_nbytes:
            return None
        return self._buffer.array[layout.header_nbytes :].reshape(layout.num_slots, layout.slot_nbytes)

    def handlers(self) -> list[tuple[Service, object]]:
        """For `rpc.Server`."""
        return [(NODE, NodeService(self._store, self.epoch, self.config.lease_seconds))]

    def join(self, directory_address: str, own_address: str) -> None:
        """Register at the directory, beat and announce, in the background and after every loss of contact.

        `own_address` is where `handlers` are served. Raises InvalidError when the node has joined already.
        """
        if self._announcer is not None:
            raise InvalidError(f"node {self.name} has joined a directory already")
        layout = self._store.layout
        info = NodeInfo(
            name=self.name,
            epoch=self.epoch,
            address=own_address,
            host_id=self.config.host_id,
            segment=self.segment,
            num_slots=layout.num_slots,
            slot_nbytes=layout.slot_nbytes,
            num_ssd_slots=0 if self._ssd is None else self._ssd.num_slots,
        )
        self._announcer = Announcer(directory_address, info, self._store)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until the directory has heard of all so far; False if it has not in time, or never joined."""
        return self._announcer is not None and self._announcer.flush(timeout_seconds)

    def spill(self, timeout_seconds: float) -> bool:
        """Write what is in DRAM only to SSD now; False if not all of it is there in time."""
        return self._spiller is not None and self._spiller.flush(timeout_seconds)

    def reserve(
        self, keys: Sequence[bytes], nbytes: int, part_nbytes: int, *, namespace: str = ""
    ) -> Reservation:
        """Slots for objects of `nbytes` bytes with a crc32 per `part_nbytes`.

        Least recently used objects give way, leased and reserved slots never. Per item: accepted, or a reason:
        "present", "writing" (by another), "no_room" (all in use), "too_large" (never fits). Raises
        InvalidError for bad keys or sizes.
        """
        check_keys(keys)
        namespace = namespace or self.config.namespace
        handle, outcome = self._store.reserve(keys, nbytes, part_nbytes, None, namespace=namespace)
        return Reservation(self._store, self.segment, handle, outcome)

    def lease(self, keys: Sequence[bytes]) -> Lease:
        """The objects of `keys` that are here, not evicted until the lease is closed.

        Those on SSD are read into DRAM first, which takes its time.
        """
        check_keys(keys)
        handle, blocks = self._store.lease(keys, None)
        return Lease(self._store, self.segment, handle, blocks, self._store.waiting(keys, blocks))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is here and whole. Asking neither pins it nor counts as a use."""
        return self._store.exists(keys)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Make keys invisible at once; False for those that are not here. Open leases stay good."""
        return self._store.remove(keys)

    def stats(self) -> dict[str, int]:
        """Slots by state (free, reserved, draining, committed, removed), leases, hits, evicted and corrupt
        blocks; the same of the SSD tier."""
        return self._store.stats()

    def validate(self) -> None:
        """Raise AssertionError if the books do not balance (for tests)."""
        self._store.validate()

    def close(self) -> None:
        """Leave the directory, refuse calls, unregister and remove the shared memory."""
        if self._closed:
            return
        self._closed = True
        if self._announcer is not None:
            self._announcer.close()
        if self._spiller is not None:
            self._spiller.close()
        self._checksummer.close()
        self._store.close()
        if self._ssd is not None:
            self._ssd.close()
        try:
            self._engine.unregister(self._segment_name, wait_seconds=_UNREGISTER_SECONDS)
        except TransferError as error:
            log.warning("node %s closes while its memory is being read: %s", self.name, error)
        self._buffer.close()


def _open_ssd(config: NodeConfig) -> SsdTier | None:
    if not config.ssd_path:
        return None
    try:
        return SsdTier(Path(config.ssd_path), config.ssd_nbytes, config.slot_nbytes)
    except OSError as error:
        log.error("node %s goes without its SSD tier: %s: %s", config.name, config.ssd_path, error)
        return None

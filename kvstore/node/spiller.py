"""The thread that writes to SSD what a `TieredStore` holds in DRAM only."""

from __future__ import annotations

import logging
import threading

from kvstore.errors import UnavailableError
from kvstore.node.slots import Block
from kvstore.node.ssd import SsdTier
from kvstore.node.ssd.tier import Staged
from kvstore.node.tiered import TieredStore
from kvstore.parts import part_crcs

_BATCH_NBYTES = 64 << 20  # between two syncs
_RETRY_SECONDS = 0.5  # while the disk takes nothing
log = logging.getLogger(__name__)


class Spiller:
    """Writes in batches: bytes, sync, then the records that name them."""

    def __init__(self, store: TieredStore, ssd: SsdTier, name: str):
        self._store = store
        self._ssd = ssd
        self._batch = max(1, min(1024, _BATCH_NBYTES // store.layout.slot_nbytes))
        self._stopped = False
        self._changed = threading.Condition()  # guards the next two
        self._asked = self._answered = 0  # calls of flush
        self._thread = threading.Thread(target=self._run, name=f"spill-{name}", daemon=True)
        self._thread.start()

    def flush(self, timeout_seconds: float) -> bool:
        """Write everything that is in DRAM only; False if not all of it is written in time."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._store.spillable.set()
            self._changed.wait_for(lambda: self._answered >= mine or self._stopped, timeout_seconds)
            return self._answered >= mine and not self._store.num_unspilled()

    def close(self) -> None:
        """Stop after the batch under way."""
        self._stopped = True
        self._store.spillable.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._store.spillable.wait(_RETRY_SECONDS)
            self._store.spillable.clear()
            with self._changed:
                asked = self._asked
            try:
                while not self._stopped and self._spill(everything=asked > self._answered):
                    pass
            except UnavailableError:
                return  # the store was closed
            except Exception:  # or nothing would be spilled any more
                log.exception("objects were not spilled to SSD")
            with self._changed:
                self._answered = asked
                self._changed.notify_all()

    def _spill(self, *, everything: bool) -> bool:
        """One batch; False when there was none, or the disk did not take it."""
        blocks = self._store.begin_spill(self._batch, everything=everything)
        if not blocks:
            return False
        written = [(block, self._write(block)) for block in blocks]
        if not self._ssd.sync():
            self._ssd.discard([staged for _, staged in written if staged is not None])
            written = [(block, None) for block in blocks]
        self._store.end_spill(written)
        return any(staged is not None for _, staged in written)

    def _write(self, block: Block) -> Staged | None:
        data = self._store.view(block).toreadonly()
        crcs = block.crcs or part_crcs(data, block.part_nbytes)
        staged = self._ssd.stage(block.key, data, block.part_nbytes, crcs, block.namespace)
        if staged is not None and not self._store.is_unchanged(block):
            self._ssd.discard([staged])
            return None
        return staged

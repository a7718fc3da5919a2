"""The thread that computes the crcs of objects which were put without: a put is a copy and no more."""

from __future__ import annotations

import logging
import threading

from kvstore.errors import UnavailableError
from kvstore.node.store import SlotStore
from kvstore.parts import part_crcs

log = logging.getLogger(__name__)


class Checksummer:
    """Works right after the commits. Who needs crcs earlier computes them himself: see `SlotStore.crcs`."""

    def __init__(self, store: SlotStore, name: str):
        self._store = store
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"crc-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave what is not done."""
        self._stopped = True
        self._store.unchecked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (block := self._store.unchecked.get()) is not None:
            if self._stopped:
                return
            try:
                if block.crcs is None and self._store.is_current(block):
                    crcs = part_crcs(self._store.view(block), block.part_nbytes)
                    if self._store.is_current(block):  # nobody else's bytes, which came meanwhile
                        block.crcs = crcs
            except UnavailableError:
                return  # the store was closed
            except Exception:
                log.exception("the crcs of an object were not computed")

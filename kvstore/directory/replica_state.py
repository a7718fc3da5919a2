"""The directory's state as a watcher rebuilds it from the stream. Pure."""

from __future__ import annotations

from kvstore.directory.index import PrefixIndex
from kvstore.errors import InternalError
from kvstore.messages import Forgotten, Joined, KeysChanged, NodeInfo, WatchBatch, WatchEvent, WatchRequest


class ReplicaState:
    """Nodes and their keys.

    `apply` returns what changed, so that a listener of the changes sees the same state.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.nodes: dict[str, NodeInfo] = {}
        self.position = WatchRequest(0, 0)  # what to ask for to go on from here
        self._snapshot: list[WatchEvent] = []

    def restart_stream(self) -> None:
        """A new stream begins: half a snapshot is of no use."""
        self._snapshot = []

    def ask_for_snapshot(self) -> None:
        """Something is wrong with what is known: the next stream puts it right."""
        self.position = WatchRequest(0, 0)

    def apply(self, batch: WatchBatch) -> list[WatchEvent]:
        """Take the next batch. Raises InternalError on a gap; then `position` asks for a snapshot.

        A snapshot is compared with what was known: listeners hear the differences, not everything again.
        """
        if batch.snapshot == "more":
            self._snapshot += batch.events
            return []
        if batch.snapshot == "last":
            events = self._differences([*self._snapshot, *batch.events])
            self._snapshot = []
        else:
            expected = self.position.sequence + len(batch.events)
            if batch.epoch != self.position.epoch or batch.sequence != expected:
                self.ask_for_snapshot()
                raise InternalError(
                    f"the watch stream has a gap: event {batch.sequence}, expected {expected}"
                )
            events = batch.events
        for event in events:
            self._apply(event)
        self.position = WatchRequest(batch.epoch, batch.sequence)
        return events

    def state_events(self) -> list[WatchEvent]:
        """Events that rebuild this state."""
        events: list[WatchEvent] = []
        for name, info in self.nodes.items():
            in_dram, on_ssd = self.index.keys(name, "dram"), self.index.keys(name, "ssd")
            events += [Joined(info), KeysChanged(name, list(in_dram), [], list(on_ssd))]
        return events

    def _apply(self, event: WatchEvent) -> None:
        if isinstance(event, Joined):
            self.nodes[event.info.name] = event.info
            self.index.bit(event.info.name)
        elif isinstance(event, Forgotten):
            self.nodes.pop(event.name, None)
            self.index.forget(event.name)
        elif event.name in self.nodes:
            self.index.remove(event.name, event.removed)
            self.index.add(event.name, event.added)
            self.index.add(event.name, event.on_ssd, "ssd")

    def _differences(self, snapshot: list[WatchEvent]) -> list[WatchEvent]:
        nodes = {event.info.name: event.info for event in snapshot if isinstance(event, Joined)}
        in_dram: dict[str, set[bytes]] = {name: set() for name in nodes}
        on_ssd: dict[str, set[bytes]] = {name: set() for name in nodes}
        for event in snapshot:
            if isinstance(event, KeysChanged):
                in_dram[event.name].update(event.added)
                on_ssd[event.name].update(event.on_ssd)
        events: list[WatchEvent] = []
        events += [Forgotten(name) for name, info in self.nodes.items() if nodes.get(name) != info]
        for name, info in nodes.items():
            same = self.nodes.get(name) == info
            dram_before = self.index.keys(name, "dram") if same else set()
            ssd_before = self.index.keys(name, "ssd") if same else set()
            if not same:
                events.append(Joined(info))
            added, spilled = in_dram[name] - dram_before, on_ssd[name] - ssd_before
            removed = (dram_before | ssd_before) - in_dram[name] - on_ssd[name]
            if added or spilled or removed:
                events.append(KeysChanged(name, list(added), list(removed), list(spilled)))
        return events

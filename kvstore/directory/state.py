"""Who holds what, as the nodes tell it. Soft state: everything in here can be told again.

Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.directory.event_log import EventLog
from kvstore.directory.index import PrefixIndex
from kvstore.errors import ExhaustedError, InvalidError, StaleError
from kvstore.messages import (
    MAX_BATCH_KEYS,
    Announce,
    Forgotten,
    Joined,
    KeysChanged,
    LookupReply,
    NodeBeat,
    NodeId,
    NodeInfo,
    NodeLoad,
    Replica,
    WatchEvent,
)

_MAX_NODES = 4096
_MAX_REPLACED = 16_384
_LOG_CAPACITY = 500_000  # keys: about 40 MB


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    heard: float
    sequence: int
    num_free: int
    is_draining: bool = False


class DirectoryState:
    """Registered nodes and their keys, and the log of what changed.

    A node silent for `timeout_seconds` is forgotten.
    """

    def __init__(self, timeout_seconds: float, *, log_capacity: int = _LOG_CAPACITY):
        self.timeout_seconds = timeout_seconds
        self.log = EventLog(log_capacity)
        self._members: dict[str, _Member] = {}
        self._index = PrefixIndex()
        self._replaced: OrderedDict[tuple[str, int], None] = OrderedDict()

    def register(self, info: NodeInfo, now: float) -> None:
        """A node is there, with no keys yet. What an earlier life of it held is forgotten.

        Raises StaleError for a life that another one of this name has replaced, InvalidError for a segment
        that is too small for the slots, ExhaustedError for too many nodes.
        """
        if (info.name, info.epoch) in self._replaced:
            raise StaleError(
                f"epoch {info.epoch:x} of node {info.name!r} was replaced by another node of that name"
            )
        if info.segment.nbytes < info.num_slots * info.slot_nbytes:
            raise InvalidError(
                f"node {info.name!r}: {info.segment.nbytes} bytes do not hold {info.num_slots} slots"
            )
        before = self._members.get(info.name)
        if before is None and len(self._members) >= _MAX_NODES:
            raise ExhaustedError(f"the directory has {_MAX_NODES} nodes already")
        if before is not None:
            self._forget(info.name)
            if before.info.epoch != info.epoch:
                self._replaced[info.name, before.info.epoch] = None
                while len(self._replaced) > _MAX_REPLACED:
                    self._replaced.popitem(last=False)
        self._members[info.name] = _Member(info, now, 0, info.num_slots)
        self._index.bit(info.name)
        self.log.append(Joined(info))

    def heartbeat(self, beat: NodeBeat, now: float) -> bool:
        """False if that life of the node is not known."""
        member = self._member(beat.name, beat.epoch)
        if member is None:
            return False
        member.heard, member.num_free, member.is_draining = now, beat.num_free, beat.is_draining
        return True

    def announce(self, news: Announce, now: float) -> bool:
        """False if that life is not known, or an announcement is missing: the node must register again.

        Raises InvalidError when a node claims more keys than it has slots, or a key twice.
        """
        member = self._member(news.name, news.epoch)
        if member is None:
            return False
        member.heard, member.num_free, member.is_draining = now, news.num_free, news.is_draining
        if news.sequence == member.sequence:
            return True
        if news.sequence != member.sequence + 1:
            return False
        present = {*news.added, *news.on_ssd}
        if len(present) < len(news.added) + len(news.on_ssd) or present.intersection(news.removed):
            raise InvalidError(f"node {news.name!r}: a key is announced twice, such as added and removed")
        gone = {key for key in news.removed if self._index.holds(news.name, key)}
        new = {key for key in present if not self._index.holds(news.name, key)}
        num_slots = member.info.num_slots + member.info.num_ssd_slots
        if self._index.num_keys(news.name) - len(gone) + len(new) > num_slots:
            raise InvalidError(f"node {news.name!r} announces more keys than its {num_slots} slots")
        member.sequence = news.sequence
        self._index.remove(news.name, news.removed)
        self._index.add(news.name, news.added)
        self._index.add(news.name, news.on_ssd, "ssd")
        self.log.append(KeysChanged(news.name, news.added, news.removed, news.on_ssd))
        return True

    def leave(self, node: NodeId) -> None:
        """The node goes; unknown ones are gone already."""
        if self._member(node.name, node.epoch) is not None:
            self._forget(node.name)

    def expire(self, now: float) -> list[str]:
        """Forget the nodes that were silent too long; their names."""
        silent = [name for name, member in self._members.items() if now - member.heard > self.timeout_seconds]
        for name in silent:
            self._forget(name)
        return silent

    def lookup(self, keys: Sequence[bytes]) -> LookupReply:
        """Who holds each of `keys`."""
        found = [self._index.replicas(key) for key in keys]
        numbers = {
            name: number for number, name in enumerate(sorted({name for some in found for name in some}))
        }
        return LookupReply(
            nodes=[self._members[name].info for name in numbers],
            holders=[[Replica(numbers[name], tier) for name, tier in some.items()] for some in found],
        )

    def nodes(self) -> list[NodeLoad]:
        """Every node with what it last said."""
        return [
            NodeLoad(member.info, member.num_free, self._index.num_keys(name), member.is_draining)
            for name, member in self._members.items()
        ]

    def snapshot(self) -> list[WatchEvent]:
        """Events that rebuild the state of now."""
        events: list[WatchEvent] = []
        for name, member in self._members.items():
            events.append(Joined(member.info))
            in_dram, on_ssd = self._index.keys(name, "dram"), self._index.keys(name, "ssd")
            events.extend(KeysChanged(name, keys, []) for keys in _chunks(in_dram))
            events.extend(KeysChanged(name, [], [], keys) for keys in _chunks(on_ssd))
        return events

    def _member(self, name: str, epoch: int) -> _Member | None:
        member = self._members.get(name)
        return member if member is not None and member.info.epoch == epoch else None

    def _forget(self, name: str) -> None:
        del self._members[name]
        self._index.forget(name)
        self.log.append(Forgotten(name))


def _chunks(keys: set[bytes]) -> Iterator[list[bytes]]:
    rest = iter(keys)
    while chunk := list(islice(rest, MAX_BATCH_KEYS)):
        yield chunk

"""Copies of objects on several nodes: made, dropped, moved off a node that drains, repaired."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstore.client.locator import Locator
from kvstore.client.peers import Peers
from kvstore.client.remote_lease import RemoteLease
from kvstore.client.remote_put import PutResult, put_on
from kvstore.directory.replica import DirectoryReplica
from kvstore.errors import InvalidError, NotFoundError, StoreError
from kvstore.messages import MAX_BATCH_KEYS, NodeDrain, NodeInfo, NodeKeys
from kvstore.transfer import TransferEngine

ChangeResult = Literal["done", "unchanged", "missing", "last", "no_room", "too_large", "failed"]
Progress = Callable[[int], object]  # how many more keys are dealt with
_CHUNK_NBYTES = 64 << 20  # in this process's memory at a time
_NODE_SECONDS = 2.0
_OF_PUT: dict[PutResult, ChangeResult] = {
    "stored": "done",
    "present": "done",
    "writing": "failed",
    "no_room": "no_room",
    "too_large": "too_large",
    "failed": "failed",
}
log = logging.getLogger(__name__)


def _ignore(_: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class MoveReport:
    """What became of the keys that had too few replicas."""

    num_keys: int
    num_done: int
    failures: dict[ChangeResult, int]


class Replicas:
    """Changes where objects are. Bytes go through this process: read from one node, verified, put on another.

    Nodes are chosen by room, on hosts without a replica first. Not for many threads at a time.
    """

    def __init__(
        self,
        locator: Locator,
        replica: DirectoryReplica,
        peers: Peers,
        engine: TransferEngine,
        lease: Callable[[NodeInfo, Sequence[bytes], float], RemoteLease],
        timeout_seconds: float,
    ):
        self._locator = locator
        self._replica = replica
        self._peers = peers
        self._engine = engine
        self._lease = lease
        self._timeout_seconds = timeout_seconds

    def add(self, keys: Sequence[bytes], node_name: str) -> list[ChangeResult]:
        """A replica of each key on a node. Raises NotFoundError for an unknown node."""
        target = self._node(node_name)
        results: list[ChangeResult] = ["missing"] * len(keys)
        holders = self._locator.holders(keys)
        for index, some in enumerate(holders):
            if any(info.name == node_name for info in some):
                results[index] = "unchanged"
        for attempt in range(max(map(len, holders), default=0)):
            groups: dict[str, list[int]] = {}
            for index, some in enumerate(holders):
                if results[index] in ("missing", "failed") and attempt < len(some):
                    groups.setdefault(some[attempt].name, []).append(index)
            for source, indices in groups.items():
                for chunk in _chunks(indices, self._node(source).slot_nbytes):
                    answers = self._try_copy([keys[i] for i in chunk], self._node(source), target)
                    for index, answer in zip(chunk, answers, strict=True):
                        results[index] = answer
        return results

    def drop(self, keys: Sequence[bytes], node_name: str) -> list[ChangeResult]:
        """No replica on a node; "last": it has the only one, which stays (`Client.remove` removes it)."""
        node = self._node(node_name)
        safe = [False] * len(keys)
        holders = self._locator.holders(keys)
        for name in {info.name for some in holders for info in some} - {node_name}:
            asked = [i for i, some in enumerate(holders) if any(info.name == name for info in some)]
            for index, here in zip(asked, self._ask("exists", self._node(name), keys, asked), strict=True):
                safe[index] = safe[index] or here
        going = [index for index, ok in enumerate(safe) if ok]
        results: list[ChangeResult] = [
            "unchanged" if node_name not in {info.name for info in some} else "last" for some in holders
        ]
        for index, gone in zip(going, self._ask("remove", node, keys, going), strict=True):
            results[index] = "done" if gone else "unchanged"
            self._locator.note(keys[index], node_name, present=False)
        return results

    def set_number(self, keys: Sequence[bytes], num: int) -> list[ChangeResult]:
        """Exactly `num` replicas of each key, or the reason why not."""
        if num < 1:
            raise InvalidError(f"{num} replicas: expected at least 1 (`remove` takes the last)")
        results: list[ChangeResult] = ["unchanged"] * len(keys)
        tiers = self._replica.replicas(keys)
        holders = [{info.name: info for info in some} for some in self._locator.holders(keys)]
        wrong = {index for index, some in enumerate(holders) if len(some) != num}
        while wrong:
            actions: dict[tuple[str, bool], list[int]] = {}
            for index in list(wrong):
                here = holders[index]
                action = None
                if not here:
                    results[index] = "missing"
                elif len(here) > num:
                    action = min(here, key=lambda name: (tiers[index].get(name) != "ssd", name)), False
                elif (node := self._roomiest_but(here)) is None:
                    results[index] = "no_room"
                else:
                    action = node.name, True
                if action is None:
                    wrong.discard(index)
                else:
                    actions.setdefault(action, []).append(index)
            for (name, is_more), indices in actions.items():
                change = self.add if is_more else self.drop
                for index, result in zip(indices, change([keys[i] for i in indices], name), strict=True):
                    results[index] = result
                    if is_more:
                        holders[index][name] = self._node(name)
                    else:
                        holders[index].pop(name, None)
                    if result not in ("done", "unchanged") or len(holders[index]) == num:
                        wrong.discard(index)
        return results

    def drain(self, node_name: str, progress: Progress = _ignore) -> MoveReport:
        """Let a node take nothing new, and give every object that only it has another home.

        Afterwards the node can be stopped. Raises NotFoundError for an unknown node, StoreError when it does
        not answer.
        """
        node = self._node(node_name)
        self._peers.stub(node).drain(NodeDrain(node.epoch, True))
        keys = list(self._replica.keys(node_name))
        alone = [
            key
            for key, some in zip(keys, self._locator.holders(keys), strict=True)
            if {info.name for info in some} == {node_name}
        ]
        return self._spread(alone, 2, progress)

    def undrain(self, node_name: str) -> None:
        """The node takes new objects again."""
        node = self._node(node_name)
        self._peers.stub(node).drain(NodeDrain(node.epoch, False))

    def repair(self, num: int, progress: Progress = _ignore) -> MoveReport:
        """At least `num` replicas of everything that the directory lists."""
        keys = list({key for info in self._replica.nodes() for key in self._replica.keys(info.name)})
        few = [key for key, some in zip(keys, self._replica.replicas(keys), strict=True) if len(some) < num]
        return self._spread(few, num, progress)

    def _spread(self, keys: list[bytes], num: int, progress: Progress) -> MoveReport:
        failures: dict[ChangeResult, int] = {}
        for start in range(0, len(keys), MAX_BATCH_KEYS):
            results = self.set_number(keys[start : start + MAX_BATCH_KEYS], num)
            for result in results:
                if result not in ("done", "unchanged"):
                    failures[result] = failures.get(result, 0) + 1
            progress(len(results))
        return MoveReport(len(keys), len(keys) - sum(failures.values()), failures)

    def _roomiest_but(self, holders: dict[str, NodeInfo]) -> NodeInfo | None:
        hosts = {info.host_id for info in holders.values()}
        others = [
            info
            for info in self._locator.nodes_by_room()
            if info.name not in holders and not self._peers.is_suspect(info.name)
        ]
        return min(others, key=lambda info: info.host_id in hosts, default=None)

    def _copy(self, keys: list[bytes], source: NodeInfo, target: NodeInfo) -> list[ChangeResult]:
        """In as many turns as the DRAM of a source with an SSD tier needs."""
        results: list[ChangeResult] = ["missing"] * len(keys)
        left = list(range(len(keys)))
        while left:
            deadline = time.monotonic() + self._timeout_seconds
            with self._lease(source, [keys[index] for index in left], _NODE_SECONDS) as lease:
                groups: dict[tuple[int, int, str], list[int]] = {}
                for item in (item for item, held in enumerate(lease.held) if held):
                    alike = lease.nbytes(item), lease.part_nbytes(item), lease.namespace(item)
                    groups.setdefault(alike, []).append(item)
                for (nbytes, part_nbytes, namespace), items in groups.items():
                    buffers = [row.data for row in np.empty((len(items), nbytes), np.uint8)]
                    right = lease.try_read(items, 0, nbytes, buffers, deadline - time.monotonic())
                    good = [place for place, ok in enumerate(right) if ok]
                    indices = [left[items[place]] for place in good]
                    some = [buffers[place] for place in good]
                    answers = self._put(
                        target, [keys[i] for i in indices], some, part_nbytes, namespace, deadline
                    )
                    for index, answer in zip(indices, answers, strict=True):
                        results[index] = answer
            left = [left[item] for item in lease.waiting] if groups else []
        return results

    def _put(
        self,
        target: NodeInfo,
        keys: list[bytes],
        buffers: list[memoryview],
        part_nbytes: int,
        namespace: str,
        deadline: float,
    ) -> list[ChangeResult]:
        if not keys:
            return []
        stub = self._peers.stub(target)
        answers = put_on(
            target,
            keys,
            buffers,
            part_nbytes,
            stub=stub,
            engine=self._engine,
            deadline=deadline,
            namespace=namespace,
        )
        results: list[ChangeResult] = [_OF_PUT[answer] for answer in answers]
        for key, result in zip(keys, results, strict=True):
            if result == "done":
                self._locator.note(key, target.name, present=True)
        return results

    def _try_copy(self, keys: list[bytes], source: NodeInfo, target: NodeInfo) -> list[ChangeResult]:
        try:
            return self._copy(keys, source, target)
        except StoreError as error:
            log.warning("%d objects were not copied: %s", len(keys), error)
            return ["failed"] * len(keys)

    def _ask(self, call: str, node: NodeInfo, keys: Sequence[bytes], indices: list[int]) -> list[bool]:
        """What a node says of some keys; nothing when it does not answer."""
        flags: list[bool] = []
        try:
            for start in range(0, len(indices), MAX_BATCH_KEYS):
                some = [keys[i] for i in indices[start : start + MAX_BATCH_KEYS]]
                flags += getattr(self._peers.stub(node), call)(NodeKeys(node.epoch, some)).flags
        except StoreError as error:
            log.warning("node %s was not asked: %s", node.name, error)
        return flags + [False] * (len(indices) - len(flags))

    def _node(self, name: str) -> NodeInfo:
        info = self._replica.node(name)
        if info is None:
            raise NotFoundError(f"no store node {name!r} in the directory")
        return info


def _chunks(indices: list[int], slot_nbytes: int) -> Iterator[list[int]]:
    size = max(1, min(MAX_BATCH_KEYS, _CHUNK_NBYTES // slot_nbytes))
    return (indices[start : start + size] for start in range(0, len(indices), size))

"""What users of the store call: batches of put, get, exists and remove, with an answer per item."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.arguments import all_as_bytes, check_keys, check_namespace
from kvstore.client.copier import Copier
from kvstore.client.locator import Locator
from kvstore.client.peers import Peers
from kvstore.client.remote_lease import RemoteLease
from kvstore.client.remote_put import PutResult, put_on
from kvstore.client.replicas import ChangeResult, Replicas
from kvstore.directory.replica import DirectoryReplica
from kvstore.errors import InvalidError, NotFoundError, StoreError
from kvstore.messages import MAX_BATCH_KEYS, NodeInfo, NodeKeys, NodeNamespace
from kvstore.node.node import Node
from kvstore.transfer import TransferEngine

_NODE_SECONDS = 2.0  # the most that one node may take to answer
_MAX_PUT_NODES = 3
_Place = Callable[[int, int], memoryview]
_Ranges = Sequence[tuple[int, int]]  # offset in the object, bytes


class Client:
    """The store, seen from one process. Thread-safe; every call ends within about `timeout_seconds`.

    With a `home` node in this process, puts go there and gets look there first. What a get returns is what
    was put under that key, or nothing: a holder that is gone, stale or damaged costs a try at the next one,
    then it is a miss.
    """

    def __init__(
        self,
        directory_address: str,
        *,
        engine: TransferEngine,
        home: Node | None = None,
        timeout_seconds: float = 10.0,
        namespace: str = "",
    ):
        """`namespace` is that of what it puts: all of it can be removed together (`drop_namespace`)."""
        check_namespace(namespace)
        self._namespace = namespace
        self.replica = DirectoryReplica(directory_address)
        self._engine = engine
        self._home = home
        self._home_name = "" if home is None else home.name
        self._timeout_seconds = timeout_seconds
        self._locator = Locator(directory_address, self.replica, host_id=engine.peer.host_id)
        self._peers = Peers(_NODE_SECONDS)
        self.replica.subscribe(self._peers)
        self._copier = Copier()
        self.replicas = Replicas(
            self._locator, self.replica, self._peers, engine, self._lease, timeout_seconds
        )
        self._counter_lock = threading.Lock()
        self._counters: Counter[str] = Counter()

    def put(
        self, keys: Sequence[bytes], buffers: Sequence[object], part_nbytes: int | None = None
    ) -> list[PutResult]:
        """Store `buffers[i]` under `keys[i]`, with one crc32 per `part_nbytes` bytes (None: one for all).

        Per item: "stored"; "present", it is there already; "writing", another client is storing it now;
        "no_room", all slots are in use; "too_large", it fits into no slot, ever; "failed", no node could be
        reached or the transfer broke. Raises InvalidError for malformed arguments.
        """
        deadline = time.monotonic() + self._timeout_seconds
        check_keys(keys)
        views = all_as_bytes(keys, buffers)
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        by_size: dict[int, list[int]] = {}
        for index in sorted(first.values()):
            if not len(views[index]):
                raise InvalidError(f"buffer {index} is empty")
            by_size.setdefault(len(views[index]), []).append(index)
        results: dict[int, PutResult] = {}
        for nbytes, indices in by_size.items():
            some_keys, some_views = [keys[i] for i in indices], [views[i] for i in indices]
            part = nbytes if part_nbytes is None else min(part_nbytes, nbytes)
            if self._home is not None:
                answers = self._put_home(self._home, some_keys, some_views, part)
            else:
                answers = self._put_elsewhere(some_keys, some_views, part, deadline)
            results.update(zip(indices, answers, strict=True))
        return [_repeated(results[first[key]], index != first[key]) for index, key in enumerate(keys)]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The objects, None where there is none to be had. Raises InvalidError for malformed keys."""
        found: dict[int, bytearray] = {}

        def place(index: int, nbytes: int) -> memoryview:
            found[index] = bytearray(nbytes)
            return memoryview(found[index])

        done = self._fetch(keys, place)
        return [bytes(found[index]) if ok else None for index, ok in enumerate(done)]

    def get_ranges(self, keys: Sequence[bytes], ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Of each object the bytes of `ranges`, `(offset, nbytes)` each, one after the other.

        One layer is a range, one shard of the heads a range per layer (`BlockFormat.layer_range`,
        `.heads_ranges`). Raises InvalidError for malformed arguments and for a range beyond an object.
        """
        into = [bytearray(_total(ranges)) for _ in keys]
        done = self.get_ranges_into(keys, ranges, into)
        return [bytes(buffer) if ok else None for buffer, ok in zip(into, done, strict=True)]

    def get_ranges_into(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[int, int]], buffers: Sequence[object]
    ) -> list[bool]:
        """`get_ranges` into `buffers`. After a miss a buffer's contents are undefined."""
        views = all_as_bytes(keys, buffers, writable=True)
        total = _total(ranges)
        for index, view in enumerate(views):
            if len(view) != total:
                raise InvalidError(f"buffer {index} has {len(view)} bytes, the ranges together {total}")
        return self._fetch(keys, lambda index, _: views[index], ranges)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[object]) -> list[bool]:
        """`get` into `buffers`, each as large as its object. After a miss a buffer's contents are undefined.

        Raises InvalidError for malformed arguments and for a buffer of another size than its object.
        """
        views = all_as_bytes(keys, buffers, writable=True)

        def place(index: int, nbytes: int) -> memoryview:
            if len(views[index]) != nbytes:
                raise InvalidError(
                    f"buffer {index} has {len(views[index])} bytes, object {keys[index].hex()} {nbytes}"
                )
            return views[index]

        return self._fetch(keys, place)

    def exists(self, keys: Sequence[bytes], fresh: bool = False) -> list[bool]:
        """Whether some node holds each key. Asking is not a use: it neither pins nor refreshes anything.

        Answered from the replica of the directory, which lags by a few ms (own puts and removes count at
        once); `fresh` asks every node, and counts one that does not answer as holding nothing.
        """
        check_keys(keys)
        here = self._home.exists(keys) if self._home is not None else [False] * len(keys)
        if all(here):
            return here
        if fresh:
            return _either(here, self._ask_all("exists", keys))
        return _either(here, self._locator.held(keys, but=self._home_name))

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys from every node that can be reached; False for those that none held."""
        check_keys(keys)
        here = self._home.remove(keys) if self._home is not None else [False] * len(keys)
        elsewhere = self._ask_all("remove", keys)
        for key, some in zip(keys, self._locator.holders(keys), strict=True):
            for info in some:
                self._locator.note(key, info.name, present=False)
        return _either(here, elsewhere)

    def drop_namespace(self, namespace: str) -> int:
        """Remove every object of a namespace from every node that can be reached; how many there were."""
        check_namespace(namespace)

        def drop(info: NodeInfo, _: list[int]) -> int:
            return self._peers.stub(info).drop_namespace(NodeNamespace(info.epoch, namespace)).count

        nodes: list[tuple[NodeInfo, list[int]]] = [(info, []) for info in self._locator.nodes()]
        return sum(count or 0 for _, count in self._peers.each(nodes, drop))

    def change_replica(
        self, keys: Sequence[bytes], *, num: int | None = None, add: str = "", drop: str = ""
    ) -> list[ChangeResult]:
        """Replicas of each key: exactly `num` of them, or one more on node `add`, or none on node `drop`.

        Per item: "done"; "unchanged", it was so already; "missing", nobody has the object; "last", it is the
        only replica and stays; or what came in the way, as with `put`. Bytes pass through this process, so
        many objects take their time. Raises InvalidError unless one change is asked for, NotFoundError for an
        unknown node.
        """
        check_keys(keys)
        if (num is not None) + bool(add) + bool(drop) != 1:
            raise InvalidError(f"one of num, add and drop: {num=}, {add=}, {drop=}")
        if num is not None:
            return self.replicas.set_number(keys, num)
        return self.replicas.add(keys, add) if add else self.replicas.drop(keys, drop)

    def lease(self, keys: Sequence[bytes], node_name: str) -> RemoteLease:
        """Hold objects on another node while they are read, range by range.

        Raises NotFoundError for an unknown node, StaleError for one that restarted, UnavailableError or
        DeadlineError for one that does not answer.
        """
        check_keys(keys)
        info = self.replica.node(node_name)
        if info is None:
            raise NotFoundError(f"no store node {node_name!r} in the directory")
        return self._lease(info, keys, min(self._timeout_seconds, _NODE_SECONDS))

    def counters(self) -> dict[str, int]:
        """Objects got from `home` and `remote`, `missed`, `stale` (listed, but gone) or `corrupt`, so far."""
        with self._counter_lock:
            return {name: self._counters[name] for name in ("home", "remote", "missed", "stale", "corrupt")}

    def close(self) -> None:
        """Join all threads and close all connections. The home node and the engine are the caller's."""
        self.replica.close()
        self._peers.close()
        self._copier.close()
        self._locator.close()

    def _fetch(self, keys: Sequence[bytes], place: _Place, ranges: _Ranges | None = None) -> list[bool]:
        """Get each object, or ranges of it, into `place(index, size of the object)`: from home, else from
        one holder after the other."""
        deadline = time.monotonic() + self._timeout_seconds
        check_keys(keys)
        done = [False] * len(keys)
        left = list(range(len(keys))) if self._home is not None else []
        while left and self._home is not None and time.monotonic() < deadline:
            with self._home.lease([keys[index] for index in left]) as lease:
                held = [item for item, here in enumerate(lease.held) if here]
                pairs = [(place(left[i], len(lease.view(i))), lease.view(i)) for i in held]
                self._copier.copy(
                    pairs if ranges is None else [piece for pair in pairs for piece in _pieces(*pair, ranges)]
                )
                for item in held:
                    done[left[item]] = True
                left = [left[item] for item in lease.waiting] if held else []
        num_home = sum(done)
        if num_home == len(keys):
            self._count(home=num_home)
            return done
        missing = [index for index, ok in enumerate(done) if not ok]
        places = self._locator.holders([keys[index] for index in missing]) if missing else []
        holders = {index: iter(some) for index, some in zip(missing, places, strict=True)}
        while missing and time.monotonic() < deadline:
            work = self._next_holders(holders)
            for indices, right in self._peers.each(
                work, lambda n, i: self._read(n, i, keys, place, deadline, ranges)
            ):
                for index, ok in zip(indices, right or [False] * len(indices), strict=True):
                    done[index] = ok
                    if ok:
                        del holders[index]
            missing = list(holders)
            if not work:
                break
        num_done = sum(done)
        self._count(home=num_home, remote=num_done - num_home, missed=len(keys) - num_done)
        return done

    def _next_holders(self, holders: dict[int, Iterator[NodeInfo]]) -> list[tuple[NodeInfo, list[int]]]:
        """The next node to ask for each item, grouped; nodes that just failed to answer are passed over."""
        infos: dict[str, NodeInfo] = {}
        groups: dict[str, list[int]] = {}
        for index, some in holders.items():
            for info in some:
                if info.name != self._home_name and not self._peers.is_suspect(info.name):
                    infos[info.name] = info
                    groups.setdefault(info.name, []).append(index)
                    break
        return [(infos[name], indices) for name, indices in groups.items()]

    def _read(
        self,
        info: NodeInfo,
        indices: list[int],
        keys: Sequence[bytes],
        place: _Place,
        deadline: float,
        ranges: _Ranges | None,
    ) -> list[bool]:
        """Lease the items `indices` on one node and read those that are there; what is on SSD there in as
        many turns as its DRAM needs."""
        done = dict.fromkeys(indices, False)
        while indices:
            timeout = min(_NODE_SECONDS, deadline - time.monotonic())
            with self._lease(info, [keys[i] for i in indices], timeout) as lease:
                by_size: dict[int, list[int]] = {}
                waiting = set(lease.waiting)
                for item, held in enumerate(lease.held):
                    if held:
                        by_size.setdefault(lease.nbytes(item), []).append(item)
                    elif item not in waiting:
                        self._locator.note(keys[indices[item]], info.name, present=False, firm=False)
                self._count(stale=lease.held.count(False) - len(waiting))
                for nbytes, items in by_size.items():
                    buffers = [place(indices[item], nbytes) for item in items]
                    right = _read_ranges(lease, items, nbytes, buffers, ranges, deadline)
                    done.update((indices[item], ok) for item, ok in zip(items, right, strict=True))
            indices = [indices[item] for item in lease.waiting] if by_size else []
        return list(done.values())

    def _lease(self, info: NodeInfo, keys: Sequence[bytes], timeout_seconds: float) -> RemoteLease:
        return RemoteLease(
            info,
            keys,
            stub=self._peers.stub(info),
            engine=self._engine,
            timeout_seconds=timeout_seconds,
            on_corrupt=self._report_corrupt,
        )

    def _report_corrupt(self, info: NodeInfo, keys: list[bytes]) -> None:
        """Let the owner look at its bytes; if they are damaged, or it is silent, forget that it holds them."""
        self._count(corrupt=len(keys))
        intact: list[bool] = []
        try:
            for start in range(0, len(keys), MAX_BATCH_KEYS):
                some = keys[start : start + MAX_BATCH_KEYS]
                intact += self._peers.stub(info).check(NodeKeys(info.epoch, some)).flags
        except StoreError:
            intact += [False] * (len(keys) - len(intact))
        for key, ok in zip(keys, intact, strict=True):
            if not ok:
                self._locator.note(key, info.name, present=False, firm=False)

    def _put_home(
        self, home: Node, keys: list[bytes], views: list[memoryview], part_nbytes: int
    ) -> list[PutResult]:
        with home.reserve(keys, len(views[0]), part_nbytes, namespace=self._namespace) as reservation:
            accepted = [index for index, yes in enumerate(reservation.accepted) if yes]
            pairs = [(reservation.buffer(index), views[index]) for index in accepted]
            self._copier.copy(pairs)
            for index in accepted:
                reservation.commit(index)
            return [reason or "stored" for reason in reservation.reasons]

    def _put_elsewhere(
        self, keys: list[bytes], views: list[memoryview], part_nbytes: int, deadline: float
    ) -> list[PutResult]:
        """Each object where it is said to be, else where most room is; what failed there, on the next node."""
        results: list[PutResult] = ["failed"] * len(keys)
        nodes = [info for info in self._locator.nodes_by_room() if not self._peers.is_suspect(info.name)]
        holders = self._locator.holders(keys)
        for attempt, roomiest in enumerate(nodes[:_MAX_PUT_NODES]):
            left = [
                index for index, result in enumerate(results) if result in ("failed", "no_room", "too_large")
            ]
            if not left or time.monotonic() >= deadline:
                break
            infos: dict[str, NodeInfo] = {}
            groups: dict[str, list[int]] = {}
            for index in left:
                info = holders[index][0] if holders[index] and not attempt else roomiest
                infos[info.name] = info
                groups.setdefault(info.name, []).append(index)

            def store(info: NodeInfo, indices: list[int]) -> list[PutResult]:
                return self._put_on(
                    info, [keys[i] for i in indices], [views[i] for i in indices], part_nbytes, deadline
                )

            for indices, answers in self._peers.each(
                [(infos[name], some) for name, some in groups.items()], store
            ):
                for index, answer in zip(indices, answers or [], strict=bool(answers)):
                    results[index] = answer
        return results

    def _put_on(
        self, info: NodeInfo, keys: list[bytes], views: list[memoryview], part_nbytes: int, deadline: float
    ) -> list[PutResult]:
        results: list[PutResult] = []
        for start in range(0, len(keys), MAX_BATCH_KEYS):
            some = slice(start, start + MAX_BATCH_KEYS)
            results += put_on(
                info,
                keys[some],
                views[some],
                part_nbytes,
                stub=self._peers.stub(info),
                engine=self._engine,
                deadline=deadline,
                namespace=self._namespace,
            )
        for key, result in zip(keys, results, strict=True):
            if result in ("stored", "present"):
                self._locator.note(key, info.name, present=True)
        return results

    def _ask_all(self, call: str, keys: Sequence[bytes]) -> list[bool]:
        """Whether any node but home answers True to `exists` or `remove`."""
        answer = [False] * len(keys)
        batches = [
            list(keys[start : start + MAX_BATCH_KEYS]) for start in range(0, len(keys), MAX_BATCH_KEYS)
        ]

        def ask(info: NodeInfo, _: list[int]) -> list[bool]:
            stub = self._peers.stub(info)
            return [
                flag for some in batches for flag in getattr(stub, call)(NodeKeys(info.epoch, some)).flags
            ]

        nodes = [info for info in self._locator.nodes() if info.name != self._home_name]
        for _, flags in self._peers.each([(info, []) for info in nodes], ask):
            if flags is not None:
                answer = _either(answer, flags)
        return answer

    def _count(self, **amounts: int) -> None:
        with self._counter_lock:
            for name, amount in amounts.items():
                self._counters[name] += amount


def _repeated(result: PutResult, again: bool) -> PutResult:
    """A key that comes twice in a batch is stored once."""
    return "present" if again and result == "stored" else result


def _either(one: list[bool], other: list[bool]) -> list[bool]:
    return [a or b for a, b in zip(one, other, strict=True)]


def _total(ranges: _Ranges) -> int:
    """Bytes of the ranges together. Raises InvalidError unless each begins in an object and has some."""
    for offset, nbytes in ranges:
        if offset < 0 or nbytes < 1:
            raise InvalidError(f"a range of {nbytes} bytes at {offset}")
    if not ranges:
        raise InvalidError("no ranges")
    return sum(nbytes for _, nbytes in ranges)


def _pieces(to: memoryview, source: memoryview, ranges: _Ranges) -> Iterator[tuple[memoryview, memoryview]]:
    """The copies that bring `ranges` of an object together. Raises InvalidError for one beyond its end."""
    at = 0
    for offset, nbytes in ranges:
        if offset + nbytes > len(source):
            raise InvalidError(f"an object has {len(source)} bytes: cannot read {nbytes} at {offset}")
        yield to[at : at + nbytes], source[offset : offset + nbytes]
        at += nbytes


def _read_ranges(
    lease: RemoteLease,
    items: list[int],
    nbytes: int,
    buffers: list[memoryview],
    ranges: _Ranges | None,
    deadline: float,
) -> list[bool]:
    """Read objects of `nbytes` bytes, or ranges of them one after the other; which came whole."""
    right, at = [True] * len(items), 0
    for offset, length in [(0, nbytes)] if ranges is None else ranges:
        parts = [buffer[at : at + length] for buffer in buffers]
        read = lease.try_read(items, offset, length, parts, deadline - time.monotonic())
        right = [a and b for a, b in zip(right, read, strict=True)]
        at += length
    return right

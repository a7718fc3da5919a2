"""The part of a prompt that need not be computed: leading blocks at home, or fetched from other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.block import BlockFormat
from kvstore.client import Client
from kvstore.node import Lease, Node
from mooncake_jax.prefill.fetch import Fetch
from mooncake_jax.prefill.fetch_times import FetchTimes
from mooncake_jax.request import Placement

_Holders = Callable[[Sequence[bytes]], list[list[str]]]


class Source(NamedTuple):
    """Another node, and the blocks to read from it."""

    node: str
    blocks: list[int]


def plan_sources(
    keys: Sequence[bytes], held: Sequence[bool], placement: Placement, holders: _Holders, home: str
) -> list[Source]:
    """Where the blocks of `keys` that are not `held` at `home` come from.

    Pure but for `holders` (key → node names).

    First what the Conductor decided (Algorithm 1). Then the answer of the turn before: its blocks are at the
    node of the decode instance that generated it, which has not the blocks before them, so that Algorithm 1
    does not see it.
    """
    sources = []
    if placement.fetch_from not in ("", home):
        missing = [i for i in range(min(placement.fetch_blocks, len(keys))) if not held[i]]
        sources += [Source(placement.fetch_from, missing)] if missing else []
    planned = {block for source in sources for block in source.blocks}
    start = next((i for i in range(len(keys)) if not held[i] and i not in planned), len(keys))
    if 0 < start < len(keys):
        first, *following = holders([keys[0], *keys[start:]])
        runs = {node: _run_length(node, following) for node in set(following[0]) - {*first, home}}
        if runs:
            node = max(sorted(runs), key=lambda name: runs[name])
            sources.append(Source(node, list(range(start, start + runs[node]))))
    return sources


def _run_length(node: str, holders: list[list[str]]) -> int:
    return next((i for i, nodes in enumerate(holders) if node not in nodes), len(holders))


class Prefix:
    """Leased at once, fetched in the background, fixed by `begin`.

    A block that is missing anywhere ends the prefix: what follows it is recomputed.
    """

    def __init__(
        self,
        home: Node,
        client: Client,
        block_format: BlockFormat,
        placement: Placement,
        num_tokens: int,
        on_progress: Callable[[], None],
        times: FetchTimes,
    ):
        """`on_progress` is called from other threads when `is_ready` may have changed."""
        self._home, self._format = home, block_format
        # at least one token is always computed
        self._keys = placement.keys[: (num_tokens - 1) // block_format.block_tokens]
        self._lease: Lease = home.lease(self._keys)
        self._fetches: list[Fetch] = []
        self._places: dict[int, tuple[Fetch, int]] = {}  # block: its fetch and its index there
        self.num_blocks = 0  # in use, since `begin`
        held, holders = self._lease.held, client.replica.holders
        try:
            for node, blocks in plan_sources(self._keys, held, placement, holders, home.name):
                fetch = Fetch(
                    home, client, block_format, [self._keys[i] for i in blocks], node, on_progress, times
                )
                self._fetches.append(fetch)
                self._places.update({block: (fetch, i) for i, block in enumerate(blocks)})
        except BaseException:
            self.close()
            raise

    @property
    def is_ready(self) -> bool:
        """Compute may begin: of every fetch the first layer group is here, or it came to nothing."""
        return all(fetch.is_usable or fetch.is_over for fetch in self._fetches)

    @property
    def expected_blocks(self) -> int:
        """Leading blocks that `begin` would find if all goes well."""
        held = self._lease.held
        return next((i for i in range(len(held)) if not held[i] and i not in self._places), len(held))

    @property
    def num_fetched(self) -> int:
        """Of the blocks in use, those that came from another node."""
        return sum(i < self.num_blocks for i in self._places)

    @property
    def num_home_blocks(self) -> int:
        """Leading blocks in use that were at home at `begin`: all their bytes are here already."""
        return next((i for i in range(self.num_blocks) if not self._lease.held[i]), self.num_blocks)

    def begin(self) -> int:
        """Fixes how many leading blocks are reused and returns it.

        Fetches that have failed are given up; blocks that came home since are found. May be called again.
        """
        for fetch in [fetch for fetch in self._fetches if not fetch.is_usable]:
            self._drop(fetch)
        newer = self._home.lease(self._keys)
        self._lease.close()
        self._lease = newer
        arriving = {block for block, (fetch, index) in self._places.items() if index < fetch.num_blocks}
        missing = (i for i in range(len(newer.held)) if not newer.held[i] and i not in arriving)
        self.num_blocks = next(missing, len(newer.held))
        return self.num_blocks

    def load(self, group: int) -> list[np.ndarray]:
        """Layer group `group` of the blocks in use, `[l, K, 2, Z, H]` each, views of store memory.

        Waits for them. Raises PrefixLostError when a fetch fails under way.
        """
        for fetch in self._fetches:
            fetch.wait_group(group)
        f, start = self._format, self._format.group_offset(group)
        return [
            np.frombuffer(self._bytes(i)[start : start + f.group_nbytes], f.item_dtype).reshape(f.group_shape)
            for i in range(self.num_blocks)
        ]

    def whole_blocks(self, start: int, stop: int) -> tuple[list[np.ndarray], list[Sequence[int]] | None]:
        """Bytes (uint8) of the blocks `[start, stop)` in use, and their crc32s if all of them came from home.

        Blocks that are being fetched may be asked for after `load` of the last group.
        """
        blocks = [np.frombuffer(self._bytes(i), np.uint8) for i in range(start, stop)]
        if not all(self._lease.held[i] for i in range(start, stop)):
            return blocks, None
        return blocks, [self._lease.crcs(i) for i in range(start, stop)]

    def stop(self) -> None:
        """Whoever waits in `load` for fetched blocks gets PrefixLostError soon."""
        for fetch in list(self._fetches):
            fetch.stop()

    def close(self) -> None:
        """Ends leases, and fetches that are under way."""
        for fetch in list(self._fetches):
            self._drop(fetch)
        self._lease.close()

    def _drop(self, fetch: Fetch) -> None:
        self._fetches.remove(fetch)
        self._places = {block: place for block, place in self._places.items() if place[0] is not fetch}
        fetch.close()

    def _bytes(self, index: int) -> memoryview:
        if self._lease.held[index]:
            return self._lease.view(index)
        fetch, place = self._places[index]
        return fetch.block(place)

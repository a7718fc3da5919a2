"""The part of a prompt that need not be computed: leading blocks of the home node's DRAM, or fetched from another node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvstore.block import BlockFormat
from kvstore.client import Client
from kvstore.node import Lease, Node
from mooncake_jax.prefill.fetch import Fetch
from mooncake_jax.request import Placement


def reusable_keys(placement: Placement, num_tokens: int, block_tokens: int) -> list[bytes]:
    """Keys of the blocks that may be reused: at least one token of the prompt is always computed."""
    return placement.keys[: (num_tokens - 1) // block_tokens]


class Prefix:
    """Leased at once, fetched in the background, fixed by `begin`. A block that is missing anywhere ends the prefix:
    what follows it is recomputed."""

    def __init__(
        self,
        home: Node,
        client: Client,
        block_format: BlockFormat,
        placement: Placement,
        num_tokens: int,
        on_progress: Callable[[], None],
    ):
        """`on_progress` is called from another thread when `is_ready` may have changed."""
        self._home, self._format = home, block_format
        self._keys = reusable_keys(placement, num_tokens, block_format.block_tokens)
        self._lease: Lease = home.lease(self._keys)
        self._fetch: Fetch | None = None
        self._fetched: dict[int, int] = {}  # block: its index in the fetch
        self.num_blocks = 0  # in use, since `begin`
        if placement.fetch_from and placement.fetch_from != home.config.name:
            held = self._lease.held
            missing = [i for i in range(min(placement.fetch_blocks, len(held))) if not held[i]]
            self._fetched = {block: i for i, block in enumerate(missing)}
        if self._fetched:
            keys = [self._keys[i] for i in self._fetched]
            self._fetch = Fetch(home, client, block_format, keys, placement.fetch_from, on_progress)

    @property
    def is_ready(self) -> bool:
        """Compute may begin: nothing is being fetched, the first layer group is here, or the fetch came to nothing."""
        return self._fetch is None or self._fetch.is_over or self._fetch.is_usable

    @property
    def expected_blocks(self) -> int:
        """Leading blocks that `begin` would find if all goes well."""
        return self._leading(len(self._fetched))

    @property
    def num_fetched(self) -> int:
        """Of the blocks in use, those that came from another node."""
        return sum(i < self.num_blocks for i in self._fetched)

    def begin(self) -> int:
        """Fixes how many leading blocks are reused and returns it. Blocks that came home since are found too."""
        if self._fetch is not None and not self._fetch.is_usable:
            self.drop_fetched()
        if self._fetch is None:
            newer = self._home.lease(self._keys)
            self._lease.close()
            self._lease = newer
        self.num_blocks = self._leading(self._fetch.num_blocks if self._fetch is not None else 0)
        return self.num_blocks

    def drop_fetched(self) -> None:
        """Goes on without the blocks of the other node. `begin` again before use."""
        if self._fetch is not None:
            self._fetch.close()
        self._fetch, self._fetched = None, {}

    def load(self, group: int) -> list[np.ndarray]:
        """Layer group `group` of the blocks in use, `[l, K, 2, Z, H]` each, views of store memory; waits for them.

        Raises PrefixLostError when a fetch fails under way.
        """
        if self._fetch is not None and self.num_fetched:
            self._fetch.wait_group(group)
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
        if any(not self._lease.held[i] for i in range(start, stop)):
            return blocks, None
        return blocks, [self._lease.crcs(i) for i in range(start, stop)]

    @property
    def num_home_blocks(self) -> int:
        """Leading blocks in use that were at home from the start: their bytes are here already."""
        return next((i for i in range(self.num_blocks) if not self._lease.held[i]), self.num_blocks)

    def stop(self) -> None:
        """Whoever waits in `load` for fetched blocks gets PrefixLostError soon."""
        if self._fetch is not None:
            self._fetch.stop()

    def close(self) -> None:
        """Ends leases, and the fetch if it is under way."""
        self.drop_fetched()
        self._lease.close()

    def _leading(self, num_fetched: int) -> int:
        held, here = self._lease.held, self._fetched
        missing = (i for i in range(len(held)) if not held[i] and here.get(i, num_fetched) >= num_fetched)
        return next(missing, len(held))

    def _bytes(self, index: int) -> memoryview:
        if self._lease.held[index]:
            return self._lease.view(index)
        if self._fetch is None:
            raise ValueError(f"block {index} is not part of the prefix")
        return self._fetch.block(self._fetched[index])

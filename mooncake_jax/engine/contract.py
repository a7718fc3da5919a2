"""Three verbs between workers and model: prefill, insert, generate. Arrays in, arrays out; no jax here.

A prefill or decode worker owns one engine and calls it from one thread. The real engines are
`mooncake_jax.engine.jax_prefill` and `jax_decode`; tests use a fake whose arithmetic a person can do.
KV crosses this contract block-major, `[M, l, K, 2, Z, H]` for M blocks of a layer group of l layers: the bytes of
`kvstore.block.BlockFormat`, so that a block's layer group is one contiguous range on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.block import BlockFormat
from kvstore.errors import UnavailableError
from models.draw import Draw
from mooncake_jax.request import Sampling


class EngineLostError(UnavailableError):
    """What the engine computes on is gone, and with it all that its slots held: `warm_up` gets it back, when it can be
    had again."""


class GroupKV(NamedTuple):
    """New KV of one layer group, ready while later groups still compute. `blocks` is valid until the array is dropped."""

    group: int
    first_block: int
    # [M, l, K, 2, Z, H]; rows past the chunk's last token are undefined and must not be read
    blocks: np.ndarray


class Sampled(NamedTuple):
    """Last item of the final chunk: the first token of the answer."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()  # the most likely tokens, as many as were asked for


class PromptScores(NamedTuple):
    """How likely prompt tokens were, `[T]`, and the most likely ones at their places, `[T, MAX_TOP]`."""

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


def top_of(tokens: np.ndarray, logprobs: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The first `count` of one row `[MAX_TOP]` of most likely tokens."""
    return list(zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True))


class DrawnTokens(NamedTuple):
    """Outcome of one decode step, `[B]` each. The most likely tokens, `[B, MAX_TOP]`, if a row asked for them."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def top(self, slot: int, count: int) -> list[tuple[int, float]]:
        """The `count` most likely tokens of a row that asked for as many."""
        if not count or self.top_tokens is None or self.top_logprobs is None:
            return []
        return top_of(self.top_tokens[slot], self.top_logprobs[slot], count)


class TileItems(Protocol):
    """What a tile gives, in order. `close` before the end gives the tile up, also before the first item."""

    def __iter__(self) -> Iterator[GroupKV | PromptScores | Sampled]: ...

    def __next__(self) -> GroupKV | PromptScores | Sampled: ...

    def close(self) -> None: ...


class PrefillEngine(Protocol):
    """Computes prompts chunk by chunk into device slots."""

    format: BlockFormat
    fingerprint: bytes
    max_tokens: int
    vocab_size: int
    num_slots: int
    tile_tokens: int  # the most tokens one `prefill` call may take; a multiple of the block size

    def attach(self, memory: np.ndarray) -> None:
        """Where the home node keeps blocks, uint8 `[slots, BlockFormat.nbytes]`: views of it that `load` gives may be read
        where they lie. Raises ValueError for memory of another shape, RuntimeError after `warm_up` for another size than
        at that time.
        """

    def warm_up(self) -> None:
        """Compile everything that serving can need; `compiles_after_ready` counts from here.

        Again after EngineLostError, which this raises too while the engine cannot be had: try again.
        """

    @property
    def compiles_after_ready(self) -> int: ...

    def feed_from(self, feed: Callable[[], None]) -> None:
        """`feed` is called, in the engine's thread and from within `next` of an open tile, whenever another tile could
        enter without delaying those that are open: it may call `prefill`. An engine that computes one tile at a time
        never calls it.
        """

    def prefill(
        self,
        slot: int,
        tokens: np.ndarray,
        start: int,
        *,
        load: Callable[[int], Sequence[np.ndarray]] | None = None,
        sample: Sampling | None = None,
        prompt: np.ndarray | None = None,
        targets: np.ndarray | None = None,
    ) -> TileItems:
        """Compute `tokens` (`[T]`, T ≤ `tile_tokens`) at positions start … start+T-1 of `slot`; start is a multiple of Z.

        `load(group)`, given on the first tile of a request with a reused prefix, returns that layer group's range of each
        of the `start // Z` prefix blocks, in order (views of store memory, `[l, K, 2, Z, H]` each); it may block until
        they have arrived, and is called right before the group that needs it. Yields one GroupKV per layer group,
        in order; then, if `targets` `[≤ T]` are given (the tokens that follow), one PromptScores of them; then, if
        `sample` is given (last tile), one Sampled with step 0 of its seed. `prompt` is the whole prompt, for a
        `sample` that looks back. The cache is written for valid tokens only: padding is never read by anyone. Raises
        ValueError for tokens or positions out of range and EngineLostError; whatever `load` raises passes through, and
        the slot may be used again. The views of `load` must not change until the last item came or, where this is left
        early, it was closed.
        """
        ...


class BatchRows(NamedTuple):
    """One decode step, a row per slot of the batch; rows of inactive slots are ignored."""

    active: np.ndarray  # [B] bool
    tokens: np.ndarray  # [B] int32: the last token of each row, not yet in the cache
    positions: np.ndarray  # [B] int32: where that token goes
    draw: Draw  # [B]: how each row's next token is drawn


class DecodeEngine(Protocol):
    """Generates for a batch of slots, one token a step (continuous batching is the worker's)."""

    format: BlockFormat
    fingerprint: bytes
    max_tokens: int
    vocab_size: int
    num_slots: int
    insert_blocks: int  # the most blocks one `insert` call may take

    def warm_up(self) -> None: ...

    @property
    def compiles_after_ready(self) -> int: ...

    def insert(self, slot: int, first_block: int, blocks: np.ndarray) -> None:
        """Put `blocks` (`[M, L, K, 2, Z, H]`, M ≤ `insert_blocks`) at block `first_block` of `slot`."""
        ...

    def remember(self, slot: int, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        """What penalties of `slot` look back at; called before the first step of a row that has any.

        From then on every token drawn in that slot is added.
        """
        ...

    def generate(self, rows: BatchRows) -> DrawnTokens:
        """One step for every active row.

        Lower slots are cheaper: the step's cost grows with the highest active slot.
        """
        ...

    def extract(self, slot: int, block: int) -> np.ndarray:
        """The bytes of one full block of `slot`, `[L, K, 2, Z, H]`, in an array of its own."""
        ...

"""Engines that compute nothing: modelled time, real bytes. Whatever is measured with them is emulated.

A prefill or decode worker drives them like the real ones, so a whole cluster of nodes that nobody has runs on one
machine: requests, blocks, transfers and decisions are real, the time that a step takes is a cost model's. One modelled
second takes `time_scale` real ones. Texts are made up, and the same for the same prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import numpy as np

from kvstore.block import BlockFormat
from models.draw import MAX_TOP
from mooncake_jax.cost_model import NodeCosts
from mooncake_jax.engine.contract import BatchRows, DrawnTokens, GroupKV, PromptScores, Sampled
from mooncake_jax.request import Sampling

LOGPROB = -1.0  # of every token
_TILE_TOKENS = 1024
_PRINTABLE = range(33, 127)  # drawn ids: letters, for a vocabulary of bytes


class Pace:
    """Makes a step take its modelled time, from its beginning on; work that is done meanwhile is part of it."""

    def __init__(self, time_scale: float):
        if not time_scale > 0.0:
            raise ValueError(f"time_scale must be positive, got {time_scale}")
        self._scale = time_scale
        self._began = self._modelled = 0.0

    def begin(self) -> None:
        """A step begins now."""
        self._began, self._modelled = time.monotonic(), 0.0

    def spend(self, modelled_seconds: float) -> None:
        """Return when the step has taken so much more."""
        self._modelled += modelled_seconds
        left = self._began + self._modelled * self._scale - time.monotonic()
        if left > 0.0:
            time.sleep(left)


class EmulatedPrefillEngine:
    """`mooncake_jax.engine.contract.PrefillEngine`. Owned by one thread."""

    compiles_after_ready = 0

    def __init__(
        self,
        costs: NodeCosts,
        block_format: BlockFormat,
        *,
        fingerprint: bytes,
        vocab_size: int,
        max_tokens: int,
        num_slots: int,
        pace: Pace,
    ):
        Z = block_format.block_tokens
        self.format, self.fingerprint = block_format, fingerprint
        self.vocab_size, self.max_tokens, self.num_slots = vocab_size, max_tokens, num_slots
        self.tile_tokens = max(_TILE_TOKENS // Z, 1) * Z
        self._costs, self._pace = costs, pace

    def attach(self, memory: np.ndarray) -> None:
        """Nothing is read in place: the bytes of a prefix are copied."""

    def feed_from(self, feed: Callable[[], None]) -> None:
        """See the contract: one tile at a time."""

    def warm_up(self) -> None:
        """Nothing to compile."""

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
    ) -> Generator[GroupKV | PromptScores | Sampled]:
        f, stop = self.format, start + len(tokens)
        if not 0 < len(tokens) <= self.tile_tokens or start % f.block_tokens or stop > self.max_tokens:
            raise ValueError(f"tile [{start}, {stop}) is too long, out of range or not on a block edge")
        self._pace.begin()
        seconds = self._seconds(start, stop, is_first=start == 0 or load is not None)
        for group in range(f.num_groups):
            if load is not None and len(load(group)) != start // f.block_tokens:
                raise ValueError(
                    f"layer group {group}: not the {start // f.block_tokens} blocks before {start}"
                )
            blocks = _blocks(f, group, tokens, start)
            self._pace.spend(seconds / f.num_groups)
            yield GroupKV(group, start // f.block_tokens, blocks)
        if targets is not None:
            top = np.zeros((len(targets), MAX_TOP), np.int32)
            yield PromptScores(np.full(len(targets), LOGPROB, np.float32), top, top.astype(np.float32))
        if sample is not None:
            token = _draw(int(tokens[-1]), stop - 1, sample.seed, self.vocab_size)
            yield Sampled(token, LOGPROB, [(token, LOGPROB)] * sample.num_top)

    def _seconds(self, start: int, stop: int, *, is_first: bool) -> float:
        """Of a tile; the tiles of a prompt together take what the model says of the prompt."""
        whole = self._costs.prefill_seconds(float(stop), float(start))
        if is_first:
            return whole
        once = self._costs.prefill_base_seconds + self._costs.prefill_seconds_per_prefix_token * start
        return whole - once


class EmulatedDecodeEngine:
    """`mooncake_jax.engine.contract.DecodeEngine`. Owned by one thread."""

    compiles_after_ready = 0
    insert_blocks = 8

    def __init__(
        self,
        costs: NodeCosts,
        block_format: BlockFormat,
        *,
        fingerprint: bytes,
        vocab_size: int,
        max_tokens: int,
        num_slots: int,
        pace: Pace,
    ):
        self.format, self.fingerprint = block_format, fingerprint
        self.vocab_size, self.max_tokens, self.num_slots = vocab_size, max_tokens, num_slots
        self._costs, self._pace = costs, pace
        shape = (num_slots, block_format.num_blocks(max_tokens), *block_format.shape)
        self._cache = np.zeros(shape, block_format.item_dtype)  # pages come with their first use

    def warm_up(self) -> None:
        """Nothing to compile."""

    def insert(self, slot: int, first_block: int, blocks: np.ndarray) -> None:
        if not 0 < len(blocks) <= self.insert_blocks or blocks.shape[1:] != self.format.shape:
            raise ValueError(
                f"blocks of shape {blocks.shape}; expected up to {self.insert_blocks} of {self.format.shape}"
            )
        self._cache[slot, first_block : first_block + len(blocks)] = blocks

    def remember(self, slot: int, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        """Penalties change no made-up text."""

    def generate(self, rows: BatchRows) -> DrawnTokens:
        self._pace.begin()
        tokens = np.full(self.num_slots, -1, np.int32)
        active = np.flatnonzero(rows.active).tolist()
        for slot in active:
            token, position = int(rows.tokens[slot]), int(rows.positions[slot])
            if position >= self.max_tokens:
                raise ValueError(f"position {position} of slot {slot}, the cache has {self.max_tokens}")
            block, at = divmod(position, self.format.block_tokens)
            layers = np.arange(self.format.num_layers)
            values = _pattern(np.array([token]), position, layers, self.format.item_dtype)  # [L, 1]
            self._cache[slot, block, :, :, :, at] = values[:, :, None, None]
            tokens[slot] = _draw(token, position, int(rows.draw.seed[slot]), self.vocab_size)
        if active:
            kv_tokens = float(rows.positions[rows.active].sum())
            self._pace.spend(self._costs.step_seconds(float(len(active)), kv_tokens))
        top = np.repeat(tokens[:, None], MAX_TOP, axis=1)
        logprobs = np.full(self.num_slots, LOGPROB, np.float32)
        return DrawnTokens(tokens, logprobs, top, np.full(top.shape, LOGPROB, np.float32))

    def extract(self, slot: int, block: int) -> np.ndarray:
        return self._cache[slot, block].copy()


def _draw(token: int, position: int, seed: int, vocab_size: int) -> int:
    first = _PRINTABLE.start if vocab_size > _PRINTABLE.stop else 0
    count = len(_PRINTABLE) if first else vocab_size
    return first + (token * 31 + position * 7 + seed) % count


def _blocks(f: BlockFormat, group: int, tokens: np.ndarray, start: int) -> np.ndarray:
    """`[M, l, K, 2, Z, H]`: bytes that tell token, position and layer apart; rows past the last token are zero."""
    Z, layers = f.block_tokens, group * f.layers_per_group + np.arange(f.layers_per_group)
    values = np.zeros((f.layers_per_group, f.num_blocks(len(tokens)) * Z), f.item_dtype)  # [l, M * Z]
    values[:, : len(tokens)] = _pattern(tokens, start, layers, f.item_dtype)
    by_block = values.reshape(f.layers_per_group, -1, Z).swapaxes(0, 1)  # [M, l, Z]
    shape = (len(by_block), *f.group_shape)
    return np.ascontiguousarray(np.broadcast_to(by_block[:, :, None, None, :, None], shape))


def _pattern(tokens: np.ndarray, start: int, layers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`[l, T]`."""
    positions = start + np.arange(len(tokens))
    values = tokens.astype(np.int64) * 31 + positions * 7 + layers[:, None]
    return (values % 0x3F80).astype(dtype)  # as bfloat16: finite, positive

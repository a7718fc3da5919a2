"""Engines whose arithmetic a person can do, with the byte layout and the calls of the real ones.

All numbers are integers mod 251. The KV of token `t` at position `i` in layer `l` holds, for element `e`
(elements counted in K, 2, H order):

    kv[l, i, e] = t + 1 + 10 l + e + digest_l(i)
    digest_l(n) = sum over positions j < n and elements e of weight(j) (e + 1) kv[l, j, e]
    weight(j) = 1 + j % 250

so every value depends on all tokens before it, and is read from the cache, never from the tokens. The next
token after `n` cached positions is `sum over l of (l + 1) digest_l(n)`, plus `seed + 13 step` unless the
temperature is 0. A wrong block, layer, K/V order, position, stale byte or missing prefix is a wrong number,
and stays wrong in all that follows. `answer` is the oracle: the same sums from the tokens alone. An error in
a step loses what all slots held, as it does where a step consumes its cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence

import numpy as np

from kvstore.block import BlockFormat
from models.draw import MAX_TOP
from mooncake_jax.engine.contract import BatchRows, DrawnTokens, GroupKV, PromptScores, Sampled
from mooncake_jax.request import Sampling

PRIME = 251
VOCAB_SIZE = 1 << 16  # ids that prompts may have; drawn ones are below PRIME
POISON = 0xBEEF  # what undefined cache rows hold
FORMAT = BlockFormat(
    num_layers=4, num_kv_heads=2, head_dim=2, block_tokens=4, dtype="bfloat16", layers_per_group=2
)
FINGERPRINT = b"fake-weights-001"


def _weight(position: int) -> int:
    return 1 + position % 250


def _draw(total: int, sampling: Sampling, step: int) -> int:
    return (total + (sampling.seed + 13 * step if sampling.temperature > 0 else 0)) % PRIME


def logprob_of(token: int) -> float:
    """The log probability that the fakes report for `token`; exact in float32."""
    return -(token + 1) / 256


def top_of_fake(token: int, count: int) -> list[tuple[int, float]]:
    """The most likely tokens that the fakes report."""
    return [(token + i, -1.0) for i in range(count)]


def answer(
    tokens: Sequence[int],
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_token_ids: Sequence[int] = (),
    block_format: BlockFormat = FORMAT,
) -> list[int]:
    """What the fake engines answer to `tokens`: the stop token, if one is drawn, is the last."""
    sampling = sampling or Sampling()
    elements = block_format.num_kv_heads * 2 * block_format.head_dim
    plain = sum(e + 1 for e in range(elements))
    offset = sum((e + 1) * e for e in range(elements))
    digests = [0] * block_format.num_layers
    position = 0

    def feed(token: int) -> None:
        nonlocal position
        for layer, digest in enumerate(digests):
            base = token + 1 + 10 * layer + digest
            digests[layer] = (digest + _weight(position) * (plain * base + offset)) % PRIME
        position += 1

    for token in tokens:
        feed(token)
    drawn: list[int] = []
    while len(drawn) < max_tokens:
        total = sum((layer + 1) * digest for layer, digest in enumerate(digests))
        drawn.append(_draw(total, sampling, len(drawn)))
        if drawn[-1] in stop_token_ids:
            break
        feed(drawn[-1])
    return drawn


class FakeCache:
    """`[B, L, K, 2, S, H]` of stored items: S positions for each of B slots."""

    def __init__(self, block_format: BlockFormat, num_slots: int, max_tokens: int):
        f = self.format = block_format
        shape = (
            num_slots,
            f.num_layers,
            f.num_kv_heads,
            2,
            f.num_blocks(max_tokens) * f.block_tokens,
            f.head_dim,
        )
        self.array = np.full(shape, POISON, f.item_dtype)
        elements = np.arange(f.num_kv_heads * 2 * f.head_dim).reshape(f.num_kv_heads, 2, f.head_dim)
        self._elements = elements

    def lose(self) -> None:
        """Forgets what every slot holds."""
        self.array[:] = POISON

    def digests(self, slot: int, layers: slice, num_tokens: int) -> np.ndarray:
        """`[l]`: digest of every layer in `layers` over the first `num_tokens` positions of `slot`."""
        kv = self.array[slot, layers, :, :, :num_tokens].astype(np.int64)  # [l, K, 2, S, H]
        weights = np.array([_weight(j) for j in range(num_tokens)], np.int64)
        per_position = np.einsum("lkcsh,kch->ls", kv, self._elements + 1)
        return (per_position % PRIME * weights).sum(axis=1) % PRIME

    def feed(self, slot: int, layers: slice, tokens: Sequence[int], start: int) -> np.ndarray:
        """Writes the KV of `tokens` at `start`; returns the digests `[l]` after them."""
        digests = self.digests(slot, layers, start)
        layer_ids = np.arange(self.format.num_layers)[layers]
        for position, token in enumerate(tokens, start):
            base = token + 1 + 10 * layer_ids + digests  # [l]
            kv = (base[:, None, None, None] + self._elements) % PRIME  # [l, K, 2, H]
            self.array[slot, layers, :, :, position] = kv
            digests = (digests + _weight(position) * np.einsum("lkch,kch->l", kv, self._elements + 1)) % PRIME
        return digests

    def blocks(self, slot: int, layers: slice, first: int, count: int) -> np.ndarray:
        """A copy, `[M, l, K, 2, Z, H]`, of `count` blocks from block `first`."""
        z = self.format.block_tokens
        rows = self.array[slot, layers, :, :, first * z : (first + count) * z]
        split = rows.reshape(*rows.shape[:3], count, z, rows.shape[-1])
        return np.ascontiguousarray(np.moveaxis(split, 3, 0))

    def write(self, slot: int, layers: slice, first: int, blocks: np.ndarray) -> None:
        z = self.format.block_tokens
        for i, block in enumerate(blocks, first):
            self.array[slot, layers, :, :, i * z : (i + 1) * z] = block

    def next_token(self, digests: np.ndarray, sampling: Sampling, step: int) -> int:
        return _draw(int((digests * np.arange(1, len(digests) + 1)).sum()), sampling, step)


class _OneThread:
    """Raises when an engine is called from a second thread."""

    def __init__(self) -> None:
        self._owner: int | None = None

    def check(self) -> None:
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        if self._owner != me:
            raise RuntimeError("a second thread called an engine that one thread owns")


class FakePrefillEngine:
    """`PrefillEngine` by sums.

    `before_group(slot, start, group)` runs before each group: tests block or raise in it.
    """

    def __init__(
        self,
        *,
        block_format: BlockFormat = FORMAT,
        fingerprint: bytes = FINGERPRINT,
        max_tokens: int = 256,
        num_slots: int = 2,
        tile_blocks: int = 2,
        seconds_per_token: float = 0.0,
        before_group: Callable[[int, int, int], None] | None = None,
    ):
        self.format, self.fingerprint = block_format, fingerprint
        self.max_tokens, self.num_slots = max_tokens, num_slots
        self.vocab_size = VOCAB_SIZE
        self.tile_tokens = tile_blocks * block_format.block_tokens
        self.compiles_after_ready = 0
        self.computed_tokens = 0
        self.before_group = before_group
        self._seconds_per_token = seconds_per_token
        self._cache = FakeCache(block_format, num_slots, max_tokens)
        self._filled = [0] * num_slots
        self._thread = _OneThread()

    def attach(self, memory: np.ndarray) -> None:
        """Prefixes are copied."""

    def feed_from(self, feed: Callable[[], None]) -> None:
        """See the contract: one tile at a time."""

    def warm_up(self) -> None:
        self._thread.check()

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
        self._thread.check()
        f = self.format
        z, stop = f.block_tokens, start + len(tokens)
        if not 0 <= slot < self.num_slots or not 0 < len(tokens) <= self.tile_tokens:
            raise ValueError(f"slot {slot} or tile of {len(tokens)} tokens out of range")
        if start % z or stop > self.max_tokens:
            raise ValueError(f"tile [{start}, {stop}) out of range or not on a block edge")
        if load is None and start not in (0, self._filled[slot]):
            raise ValueError(f"slot {slot} holds {self._filled[slot]} tokens, not {start}")
        self._filled[slot] = 0
        digests = np.zeros(0, np.int64)
        for group in range(f.num_groups):
            layers = slice(group * f.layers_per_group, (group + 1) * f.layers_per_group)
            if load is not None:
                blocks = load(group)
                if len(blocks) != start // z:
                    raise ValueError(f"{len(blocks)} prefix blocks loaded, {start // z} needed")
                self._cache.write(
                    slot, layers, 0, np.stack(blocks) if blocks else np.zeros((0, *f.group_shape))
                )
            if self.before_group is not None:
                try:
                    self.before_group(slot, start, group)
                except Exception:
                    self._cache.lose()
                    self._filled = [0] * self.num_slots
                    raise
            if self._seconds_per_token:
                time.sleep(self._seconds_per_token * len(tokens) / f.num_groups)
            digests = np.concatenate([digests, self._cache.feed(slot, layers, tokens.tolist(), start)])
            kv = self._cache.blocks(slot, layers, start // z, f.num_blocks(len(tokens)))
            if len(tokens) % z:
                kv[-1, :, :, :, len(tokens) % z :] = POISON
            yield GroupKV(group, start // z, kv)
        self._filled[slot] = stop
        self.computed_tokens += len(tokens)
        if targets is not None:
            num_targets = len(targets)
            logprobs = np.array([logprob_of(int(token)) for token in targets], np.float32)
            none = np.zeros((num_targets, MAX_TOP))
            yield PromptScores(logprobs, none.astype(np.int32), none.astype(np.float32))
        if sample is not None:
            token = self._cache.next_token(digests, sample, step=0)
            yield Sampled(token, logprob_of(token), top_of_fake(token, sample.num_top))


class FakeDecodeEngine:
    """`DecodeEngine` by sums. `before_step(rows)` runs before each step: tests block or raise in it."""

    def __init__(
        self,
        *,
        block_format: BlockFormat = FORMAT,
        fingerprint: bytes = FINGERPRINT,
        max_tokens: int = 256,
        num_slots: int = 4,
        insert_blocks: int = 2,
        seconds_per_step: float = 0.0,
        before_step: Callable[[BatchRows], None] | None = None,
    ):
        self.format, self.fingerprint = block_format, fingerprint
        self.max_tokens, self.num_slots, self.insert_blocks = max_tokens, num_slots, insert_blocks
        self.vocab_size = VOCAB_SIZE
        self.compiles_after_ready = 0
        self.before_step = before_step
        self._seconds_per_step = seconds_per_step
        self._cache = FakeCache(block_format, num_slots, max_tokens)
        self._thread = _OneThread()

    def warm_up(self) -> None:
        self._thread.check()

    def insert(self, slot: int, first_block: int, blocks: np.ndarray) -> None:
        self._thread.check()
        if not 0 < len(blocks) <= self.insert_blocks or blocks.shape[1:] != self.format.shape:
            raise ValueError(f"blocks of shape {blocks.shape}")
        self._cache.write(slot, slice(None), first_block, blocks)

    def remember(self, slot: int, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        self._thread.check()

    def generate(self, rows: BatchRows) -> DrawnTokens:
        self._thread.check()
        if self.before_step is not None:
            try:
                self.before_step(rows)
            except Exception:
                self._cache.lose()
                raise
        if self._seconds_per_step:
            time.sleep(self._seconds_per_step)
        tokens = np.full(self.num_slots, -1, np.int32)
        logprobs = np.full(self.num_slots, np.nan, np.float32)
        for slot in np.flatnonzero(rows.active).tolist():
            position = int(rows.positions[slot])
            if position >= self.max_tokens:
                raise ValueError(f"position {position} of slot {slot}, the cache has {self.max_tokens}")
            digests = self._cache.feed(slot, slice(None), [int(rows.tokens[slot])], position)
            draw = rows.draw
            sampling = Sampling(temperature=float(draw.temperature[slot]), seed=int(draw.seed[slot]))
            tokens[slot] = self._cache.next_token(digests, sampling, int(draw.step[slot]))
            logprobs[slot] = logprob_of(int(tokens[slot]))
        top = tokens[:, None] + np.arange(MAX_TOP, dtype=np.int32)
        return DrawnTokens(tokens, logprobs, top, np.zeros(top.shape, np.float32) - 1)

    def extract(self, slot: int, block: int) -> np.ndarray:
        self._thread.check()
        return self._cache.blocks(slot, slice(None), block, 1)[0]

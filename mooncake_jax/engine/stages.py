"""What a pipeline engine drives: stages that compute ticks, on devices of this process or of several. No arrays of jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from kvstore.block import BlockFormat
from models.ticks import Tick
from mooncake_jax.engine.compiles import buckets
from mooncake_jax.engine.contract import Sampled
from mooncake_jax.request import Sampling

_SMALLEST_CHUNK = 16
_LOAD_BLOCKS = 16  # prefix blocks that one program inserts, at most; a power of two
_CHUNKS_PER_STAGE = 2  # of a tile: the more, the fewer bubbles where tiles do not overlap


class PipelinePlan(msgspec.Struct, frozen=True):
    """What a pipeline holds and how it cuts prompts; equal in every process that computes for it."""

    format: BlockFormat
    fingerprint: bytes
    vocab_size: int
    max_tokens: int
    num_slots: int
    num_stages: int
    chunk_tokens: int  # of the longest chunk, a multiple of the block size

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.format.num_groups % self.num_stages:
            raise ValueError(
                f"{self.format.num_groups} layer groups do not divide over {self.num_stages} stages"
            )
        if self.chunk_tokens < 1 or self.chunk_tokens % self.format.block_tokens:
            raise ValueError(f"chunks of {self.chunk_tokens} tokens are not whole blocks")

    @property
    def sizes(self) -> list[int]:
        """Tokens of a chunk that a program is compiled for."""
        return buckets(min(_SMALLEST_CHUNK, self.chunk_tokens), self.chunk_tokens)

    @property
    def tile_tokens(self) -> int:
        """Tokens of the longest tile: several chunks."""
        longest = -(-self.max_tokens // self.chunk_tokens)
        return self.chunk_tokens * min(_CHUNKS_PER_STAGE * self.num_stages, longest)

    @property
    def groups_per_stage(self) -> int:
        return self.format.num_groups // self.num_stages

    @property
    def load_blocks(self) -> int:
        """The most prefix blocks that are inserted at a time; a power of two."""
        return min(_LOAD_BLOCKS, 1 << (self.format.num_blocks(self.max_tokens).bit_length() - 1))

    @property
    def stage_block_shape(self) -> tuple[int, ...]:
        """Of a stage's share of a block, `[L/X, K, 2, Z, H]`."""
        form = self.format
        return (form.layers_per_group * self.groups_per_stage, *form.shape[1:])

    @property
    def chunk_blocks(self) -> int:
        """Blocks of the longest chunk."""
        return self.chunk_tokens // self.format.block_tokens


class Ran(Protocol):
    """A tick that was given to the stages."""

    def blocks(self, stage: int) -> np.ndarray:
        """New KV of the chunk on `stage`, at least `[⌈tokens/Z⌉, L/X, K, 2, Z, H]`; waits for it. Valid until two ticks
        later."""
        ...

    def sampled(self) -> Sampled:
        """What was drawn after the chunk on the last stage; waits for it."""
        ...


class Stages(Protocol):
    """X stages that move in step. Owned by one thread; every call may raise EngineLostError."""

    plan: PipelinePlan

    @property
    def compiles(self) -> int:
        """New executables so far where the stages are; of several processes, the largest number."""
        ...

    @property
    def is_ready(self) -> bool: ...

    def start(self) -> None:
        """Returns when everything is compiled."""
        ...

    def reset(self) -> None:
        """Empty caches, also after a failed tick."""
        ...

    def tick(
        self, tick: Tick, tokens: np.ndarray, sample: Sampling | None, prompt: Sequence[int] | np.ndarray
    ) -> Ran:
        """Begin the next tick. `tokens` are those of the chunk that enters stage 0; `sample`: how to draw after the
        chunk on the last stage, and the `prompt` that a penalty looks back at. No more than two may be unfinished.
        """
        ...

    def insert(self, stage: int, slot: int, first_page: int, blocks: np.ndarray) -> None:
        """Put cached prefix blocks `[M, L/X, K, 2, Z, H]`, M a power of two ≤ `plan.load_blocks`, into a stage's cache.

        `blocks` may be read in place until the next tick is done: give up the array.
        """
        ...

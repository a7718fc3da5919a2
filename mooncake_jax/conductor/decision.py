"""One decision: what it is made from, and what came out."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np

Outcome = Literal[
    "placed",
    "no_prefill",  # none alive
    "no_decode",
    "too_long",  # longer than any instance that is alive can hold
    "prefill_full",  # every queue is at its limit
    "decode_full",  # no slots or no KV capacity left
    "ttft_slo",  # the forecast misses the SLO
    "tbt_slo",
]


class RequestFeatures(msgspec.Struct, frozen=True):
    """What a decision needs to know of a request; no token ids."""

    num_tokens: int  # of the prompt
    max_tokens: int  # of the answer
    block_tokens: int  # Z
    block_nbytes: int
    avoid_prefill: tuple[int, ...] = ()  # slots that just failed it: chosen only if there are no others
    avoid_decode: tuple[int, ...] = ()

    @property
    def total_tokens(self) -> int:
        return self.num_tokens + self.max_tokens

    @property
    def usable_blocks(self) -> int:
        """The longest prefix worth reusing: at least one token is computed, for its logits."""
        return (self.num_tokens - 1) // self.block_tokens


class Link(NamedTuple):
    """The way from the holder of a prefix to each prefill instance, `[P]` or one number for all."""

    start_seconds: float | np.ndarray  # until the first byte moves
    seconds_per_nbyte: float | np.ndarray


class PrefixLengths(NamedTuple):
    """FindBestPrefixMatch: leading blocks of a prompt that are held somewhere."""

    local: np.ndarray  # [P] int: in each prefill instance's home node, or soon there
    best: int  # at `holder`, the best store node of all
    holder: str  # "" when `best` is 0
    link: Link | None = None  # from `holder`; None: idle, at the cost model's rate
    own_seconds: np.ndarray | None = None  # [P] to bring own blocks from SSD into DRAM; None: none is there
    continued: int = (
        0  # blocks after the first `best` at a node without them, such as decode's: prefill gets them
    )

    @property
    def continued_at(self) -> int:
        """The prefix that is continued; -1: none is."""
        return self.best if self.continued else -1


class Decision(msgspec.Struct, frozen=True):
    """Outcome, the pair (slots), and the forecast for it; -1 and 0 where there is none."""

    outcome: Outcome
    prefill: int = -1
    decode: int = -1
    local_blocks: int = 0
    fetch_blocks: int = 0  # leading blocks to have after fetching from the holder; 0: nothing to fetch
    transfer_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    tbt_seconds: float = 0.0
    retry_after_seconds: float = 0.0  # when refused: until the forecast would fit

    @property
    def ttft_seconds(self) -> float:
        return self.transfer_seconds + self.queue_seconds + self.prefill_seconds

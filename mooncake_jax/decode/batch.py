"""Which request sits in which row of the decode batch, what each step feeds it, and when it is over. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models import draw as draws
from mooncake_jax.engine.contract import BatchRows, DrawnTokens
from mooncake_jax.engine.draw_rows import fill
from mooncake_jax.request import FinishReason, Request, TopToken


def finish_of(
    token: int, num_drawn: int, position: int, request: Request, max_tokens: int
) -> FinishReason | None:
    """Whether `token` ends its answer: the `num_drawn`-th one (1 is prefill's), which goes to `position`.

    `max_tokens` is the most that prompt and answer may have together.
    """
    if token in request.stop_token_ids:
        return "stop"
    if num_drawn >= request.max_tokens or position + 1 >= max_tokens:
        return "length"
    return None


class Drawn(NamedTuple):
    """What one step drew for one row."""

    slot: int
    token: int
    logprob: float
    finish: FinishReason | None  # set: the row has left the batch
    full_block: int | None  # block that the step's input token filled
    top: list[TopToken]  # as many as the request asked for


@dataclass
class _Row:
    request: Request
    token: int  # the last one drawn, not yet in the cache
    position: int  # where it goes
    num_drawn: int


class Batch:
    """Slots are taken lowest first (lower ones are cheaper), and join when the device cache has their KV."""

    def __init__(self, num_slots: int, max_tokens: int, block_tokens: int):
        self.num_slots = num_slots
        self._max_tokens, self._block_tokens = max_tokens, block_tokens
        self._free = list(range(num_slots))
        self._rows: dict[int, _Row] = {}
        self._arrays = BatchRows(
            active=np.zeros(num_slots, bool),
            tokens=np.zeros(num_slots, np.int32),
            positions=np.zeros(num_slots, np.int32),
            draw=draws.blank(num_slots),
        )

    def take_slot(self) -> int | None:
        """The lowest free slot, not yet active; None when all are taken."""
        return heapq.heappop(self._free) if self._free else None

    def join(self, slot: int, request: Request, first_token: int) -> None:
        """From the next step on, `slot` continues `request` from `first_token`, the one after the prompt."""
        row = self._rows[slot] = _Row(request, first_token, len(request.tokens), num_drawn=1)
        self._arrays.active[slot] = True
        fill(self._arrays.draw, slot, request.sampling)
        self._place(slot, row)

    def leave(self, slot: int) -> None:
        """The slot is free, whether it had joined or not."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._rows.pop(slot, None)
        self._arrays.active[slot] = False
        draws.clear(self._arrays.draw, slot)
        heapq.heappush(self._free, slot)

    def rows(self) -> BatchRows:
        """Input of the next step; the arrays change with `advance`."""
        return self._arrays

    def advance(self, step: DrawnTokens) -> list[Drawn]:
        """Takes a step's outcome. Rows that end leave: their `Drawn.slot` is free at once."""
        drawn = []
        for slot, row in sorted(self._rows.items()):
            filled = row.position
            row.token, row.position, row.num_drawn = (
                int(step.tokens[slot]),
                row.position + 1,
                row.num_drawn + 1,
            )
            finish = finish_of(row.token, row.num_drawn, row.position, row.request, self._max_tokens)
            block, rest = divmod(filled + 1, self._block_tokens)
            full_block, top = None if rest else block - 1, step.top(slot, row.request.sampling.num_top)
            drawn.append(Drawn(slot, row.token, float(step.logprobs[slot]), finish, full_block, top))
            if finish is None:
                self._place(slot, row)
            else:
                self.leave(slot)
        return drawn

    @property
    def num_taken(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV active rows hold."""
        return sum(row.position for row in self._rows.values())

    def _place(self, slot: int, row: _Row) -> None:
        a = self._arrays
        a.tokens[slot], a.positions[slot], a.draw.step[slot] = row.token, row.position, row.num_drawn

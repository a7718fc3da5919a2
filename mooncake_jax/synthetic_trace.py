"""Synthetic traces in the public format: conversations, agents, questions about documents.

A session starts with a prefix that it shares (a system prompt, or its own document) and adds a turn at a time; each turn
repeats all before it, answers included. These are no copies of the paper's traces and must not be quoted under their
names; `Trace.statistics` beside Table 2 says how far they are from them.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Literal

from kvstore.errors import InvalidError
from mooncake_jax.trace import BLOCK_TOKENS, Trace, TraceRequest

KindName = Literal["conversation", "agent", "document"]


@dataclass(frozen=True)
class Kind:
    """How sessions of one kind look. Lengths are log-normal: a median and the sigma of the logarithm."""

    num_prefixes: int  # shared ones; 0: every session has its own
    prefix_tokens: tuple[float, float]
    first_tokens: tuple[float, float]  # of the first question
    turn_tokens: tuple[float, float]  # of each further question
    output_tokens: tuple[float, float]
    more_turns: float  # probability that a session goes on
    think_seconds: float  # mean time to the next question


KINDS: dict[KindName, Kind] = {
    "conversation": Kind(4, (600, 0.3), (6300, 1.0), (3000, 1.0), (260, 0.75), 0.42, 90.0),
    "agent": Kind(12, (4700, 0.4), (2900, 0.6), (700, 0.6), (132, 0.8), 0.1, 15.0),
    "document": Kind(0, (9300, 1.0), (120, 0.7), (120, 0.7), (110, 0.8), 0.69, 30.0),
}
_LONGEST_TOKENS = 128_000


class _Session:
    """Tokens so far, as ids of full blocks and a rest that has none yet."""

    def __init__(self, prefix: list[int], num_tokens: int):
        self.blocks, self.num_tokens = list(prefix), num_tokens

    def grow(self, num_tokens: int, next_id: int) -> int:
        """Append tokens; new full blocks get ids from `next_id` on. Returns the next free id."""
        self.num_tokens += num_tokens
        while len(self.blocks) < self.num_tokens // BLOCK_TOKENS:
            self.blocks.append(next_id)
            next_id += 1
        return next_id


def generate(kind: KindName, num_requests: int, seconds: float, seed: int = 0) -> Trace:
    """`num_requests` that arrive over about `seconds`; equal arguments give equal traces.

    Raises InvalidError for an unknown kind, fewer requests than one, or no time.
    """
    if kind not in KINDS:
        raise InvalidError(f"trace kind {kind!r}: expected one of {sorted(KINDS)}")
    if num_requests < 1 or not seconds > 0.0:
        raise InvalidError(f"{num_requests} requests in {seconds} s: both must be positive")
    shape, rng = KINDS[kind], random.Random(seed)
    next_id = 0
    prefixes: list[_Session] = []
    for _ in range(shape.num_prefixes):
        prefix = _Session([], 0)
        next_id = prefix.grow(_length(rng, shape.prefix_tokens), next_id)
        prefixes.append(prefix)
    mean_turns = 1.0 / (1.0 - shape.more_turns)
    sessions_per_second = num_requests / mean_turns / seconds
    # (time, order, session or None for a new one)
    heap: list[tuple[float, int, _Session | None]] = [(0.0, 0, None)]
    order, requests = 1, []
    while len(requests) < num_requests:
        now, _, session = heapq.heappop(heap)
        if session is None:
            heapq.heappush(heap, (now + rng.expovariate(sessions_per_second), order, None))
            order += 1
            shared = (
                rng.choices(prefixes, [1 / (rank + 1) for rank in range(len(prefixes))])[0]
                if prefixes
                else None
            )
            session = _Session(shared.blocks, shared.num_tokens) if shared else _Session([], 0)
            added = _length(rng, shape.first_tokens) + (0 if shared else _length(rng, shape.prefix_tokens))
        else:
            added = _length(rng, shape.turn_tokens)
        if session.num_tokens + added > _LONGEST_TOKENS:
            continue
        next_id = session.grow(added, next_id)
        blocks = list(session.blocks)
        if session.num_tokens % BLOCK_TOKENS:  # the partial block at the end is never the same again
            blocks.append(next_id)
            next_id += 1
        num_output = _length(rng, shape.output_tokens)
        requests.append(TraceRequest(int(now * 1000), session.num_tokens, num_output, blocks))
        next_id = session.grow(num_output, next_id)
        if rng.random() < shape.more_turns:
            heapq.heappush(heap, (now + rng.expovariate(1.0 / shape.think_seconds), order, session))
            order += 1
    return Trace(f"synthetic {kind}", requests)


def _length(rng: random.Random, shape: tuple[float, float]) -> int:
    median, sigma = shape
    return max(1, round(median * math.exp(rng.gauss(0.0, sigma))))

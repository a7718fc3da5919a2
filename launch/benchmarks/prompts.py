"""Prompts as chains of block ids, with the prefixes that real ones share: from a trace, or generated like one."""

from __future__ import annotations

import random
from pathlib import Path

from kvstore.errors import InvalidError
from launch.process import UsageError
from mooncake_jax.trace import read_trace

TRACE_FILE = "conversation_trace.jsonl"
_NUM_PREFIXES = 8  # system prompts
_PREFIX_BLOCKS = (1, 4)
_TURN_BLOCKS = (1, 12)
_NUM_SESSIONS = 200  # open at a time
_MORE_TURNS = 0.7  # how likely a conversation goes on


def trace_file(path: Path) -> Path:
    """The conversation trace at `path`, a file or a folder that has it."""
    return path / TRACE_FILE if path.is_dir() else path


def traced(path: Path, limit: int) -> list[list[int]]:
    """The block ids of the first `limit` requests of a trace. Raises UsageError, see `mooncake_jax.trace.read_trace`."""
    try:
        return [request.hash_ids for request in read_trace(path, limit).requests]
    except InvalidError as error:
        raise UsageError(str(error)) from error


def generate(num: int, seed: int = 0) -> list[list[int]]:
    """`num` prompts of conversations that interleave; each turn repeats all before it and adds some blocks.

    Conversations begin with one of a few system prompts.
    """
    rng = random.Random(seed)
    next_id = 0

    def fresh(bounds: tuple[int, int]) -> list[int]:
        nonlocal next_id
        first, next_id = next_id, next_id + rng.randint(*bounds)
        return list(range(first, next_id))

    prefixes = [fresh(_PREFIX_BLOCKS) for _ in range(_NUM_PREFIXES)]
    sessions: list[list[int]] = []
    prompts: list[list[int]] = []
    while len(prompts) < num:
        if len(sessions) < _NUM_SESSIONS:
            sessions.append(rng.choice(prefixes))
        at = rng.randrange(len(sessions))
        sessions[at] = sessions[at] + fresh(_TURN_BLOCKS)
        prompts.append(sessions[at])
        if rng.random() > _MORE_TURNS:
            del sessions[at]
    return prompts

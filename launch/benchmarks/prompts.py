"""Prompts as chains of block ids, with the prefixes that real ones share: from a trace, or generated like one."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from launch.process import UsageError

TRACE_FILE = "conversation_trace.jsonl"
_NUM_PREFIXES = 8  # system prompts
_PREFIX_BLOCKS = (1, 4)
_TURN_BLOCKS = (1, 12)
_NUM_SESSIONS = 200  # open at a time
_MORE_TURNS = 0.7  # how likely a conversation goes on


class TraceError(UsageError):
    """A trace that cannot be read; the message names the file and the line."""


class _Line(msgspec.Struct):
    hash_ids: list[int]


def trace_file(path: Path) -> Path:
    """The conversation trace at `path`, a file or a folder that has it."""
    return path / TRACE_FILE if path.is_dir() else path


def read_trace(path: Path, limit: int) -> list[list[int]]:
    """The block ids of the first `limit` requests of a Mooncake trace (JSON lines with `hash_ids`).

    Raises TraceError.
    """
    chains: list[list[int]] = []
    try:
        with path.open("rb") as lines:
            for number, line in zip(range(1, limit + 1), lines, strict=False):
                try:
                    chains.append(msgspec.json.decode(line, type=_Line).hash_ids)
                except msgspec.MsgspecError as error:
                    raise TraceError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not chains:
        raise TraceError(f"{path} has no lines")
    return chains


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

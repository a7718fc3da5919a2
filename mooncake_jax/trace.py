"""Request traces in Mooncake's public format: a strict reader, a writer, and what a trace consists of.

A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`. Equal ids are
equal blocks of `BLOCK_TOKENS` tokens after equal blocks; the last block of a prompt may be partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.errors import InvalidError

BLOCK_TOKENS = 512

Count = Annotated[int, Meta(ge=0)]
Length = Annotated[int, Meta(ge=1)]


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a trace."""

    timestamp: Count  # milliseconds after the start
    input_length: Length  # tokens of the prompt
    output_length: Length  # tokens of the answer
    hash_ids: list[Count]  # of the prompt's blocks, the partial one at the end included

    @property
    def full_blocks(self) -> int:
        """Blocks that can be stored: the last one only if it is full."""
        return self.input_length // BLOCK_TOKENS


@dataclass(frozen=True)
class TraceStatistics:
    """The columns of the paper's Table 2, and what else one asks of a trace."""

    num_requests: int
    span_seconds: float
    mean_input_tokens: float
    mean_output_tokens: float
    longest_input_tokens: int
    cached_tokens: float  # share of all input tokens that an infinite cache of full blocks would reuse
    cached_per_request: float  # the same share as a mean over requests
    num_blocks: int  # distinct full blocks


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their timestamps."""

    name: str
    requests: Sequence[TraceRequest]

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def statistics(self) -> TraceStatistics:
        """Raises InvalidError for a trace without requests."""
        if not self.requests:
            raise InvalidError(f"trace {self.name}: no requests")
        seen: set[int] = set()
        reused_tokens, reused_shares = 0, 0.0
        for request in self.requests:
            blocks = request.hash_ids[: request.full_blocks]
            num_reused = leading(blocks, seen)
            tokens = min(num_reused * BLOCK_TOKENS, request.input_length - 1)
            reused_tokens += tokens
            reused_shares += tokens / request.input_length
            seen.update(blocks[num_reused:])
        num = len(self.requests)
        num_tokens = sum(request.input_length for request in self.requests)
        return TraceStatistics(
            num_requests=num,
            span_seconds=(self.requests[-1].timestamp - self.requests[0].timestamp) / 1000,
            mean_input_tokens=num_tokens / num,
            mean_output_tokens=sum(request.output_length for request in self.requests) / num,
            longest_input_tokens=max(request.input_length for request in self.requests),
            cached_tokens=reused_tokens / num_tokens,
            cached_per_request=reused_shares / num,
            num_blocks=len(seen),
        )

    def head(self, num_requests: int) -> Trace:
        """The first `num_requests`."""
        return Trace(self.name, self.requests[:num_requests])

    def thinned(self, one_in: int) -> Trace:
        """One conversation in `one_in`, whole: requests with the same second block go together.

        The first block is the same system prompt for (nearly) all; a request without a second one is its own
        conversation.
        """
        if one_in < 1:
            raise InvalidError(f"trace {self.name}: one conversation in {one_in}, expected 1 or more")
        kept = [
            request
            for index, request in enumerate(self.requests)
            if (request.hash_ids[1] if len(request.hash_ids) > 1 else index) % one_in == 0
        ]
        return Trace(f"{self.name} 1/{one_in}", kept)

    def superposed(self, times: int) -> Trace:
        """`times` copies that arrive together, each with blocks of its own: a larger cluster's load."""
        if times < 1:
            raise InvalidError(f"trace {self.name}: {times} copies, expected 1 or more")
        stride = 1 + max((block for request in self.requests for block in request.hash_ids), default=0)
        copies = [
            msgspec.structs.replace(request, hash_ids=[block + copy * stride for block in request.hash_ids])
            for request in self.requests
            for copy in range(times)
        ]
        return Trace(f"{self.name} x{times}", copies)


def leading(blocks: Sequence[int], held: set[int]) -> int:
    """How many blocks from the start are in `held`."""
    for index, block in enumerate(blocks):
        if block not in held:
            return index
    return len(blocks)


def read_trace(path: str | Path, limit: int | None = None) -> Trace:
    """The first `limit` requests of a file, or all.

    Raises InvalidError, which names the file and the line, for a line that is no request, a timestamp that goes
    back, a number of blocks unlike the prompt's length, or a block that follows different blocks.
    """
    path = Path(path)
    try:
        with path.open("rb") as lines:
            requests = list(_checked(path, lines, limit))
    except OSError as error:
        raise InvalidError(f"trace {path}: {error.strerror}") from error
    if not requests:
        raise InvalidError(f"trace {path} has no lines")
    return Trace(path.stem.removesuffix("_trace"), requests)


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write `trace` in the public format. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with Path(path).open("wb") as file:
        file.writelines(encode(request) + b"\n" for request in trace.requests)


def _checked(path: Path, lines: Iterable[bytes], limit: int | None) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(TraceRequest).decode
    parents: dict[int, int] = {}
    timestamp = 0
    for number, line in enumerate(lines, 1):
        if limit is not None and number > limit:
            return
        try:
            request = decode(line)
        except msgspec.MsgspecError as error:
            raise InvalidError(f"trace {path}, line {number}: {error}") from error
        fault = _fault(request, timestamp, parents)
        if fault:
            raise InvalidError(f"trace {path}, line {number}: {fault}")
        timestamp = request.timestamp
        yield request


def _fault(request: TraceRequest, timestamp: int, parents: dict[int, int]) -> str:
    # `parents`: the block before each block, -1 before a prompt's first; grows
    if request.timestamp < timestamp:
        return f"timestamp {request.timestamp} after {timestamp}; lines must be in the order of arrival"
    num_blocks = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != num_blocks:
        return (
            f"{len(request.hash_ids)} hash_ids for {request.input_length} tokens, expected {num_blocks} "
            f"(one per {BLOCK_TOKENS} tokens)"
        )
    parent = -1
    for block in request.hash_ids:
        before = parents.setdefault(block, parent)
        if before != parent:
            return f"block {block} follows {parent} here and {before} earlier; an id names all before it"
        parent = block
    return ""

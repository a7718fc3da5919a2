"""Real prompts for the lines of a trace, on any scale: equal blocks of the trace are equal token blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidError
from mooncake_jax.trace import BLOCK_TOKENS, Trace, TraceRequest

_ID_TOKENS = 4  # the first tokens of a block spell its id


@dataclass(frozen=True)
class Scale:
    """A trace's block of 512 tokens becomes `block_tokens` tokens, and lengths shrink alike (rounded up).

    `speed`: how many times faster requests arrive. A line whose prompt and answer together exceed `max_tokens` (0: no
    limit) is left out, and counted. Token ids are below `vocab_size`.
    """

    block_tokens: int = BLOCK_TOKENS
    output_share: float = 1.0  # of the answer's length, after scaling; at least one token
    speed: float = 1.0
    max_tokens: int = 0
    vocab_size: int = 250

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or not self.speed > 0.0 or not self.output_share >= 0.0:
            raise InvalidError(
                f"scale: block_tokens and speed must be positive, output_share 0 or more: {self}"
            )
        if self.vocab_size < 2:
            raise InvalidError(f"scale: vocab_size {self.vocab_size}; expected 2 or more")


@dataclass(frozen=True)
class Line:
    """One request to send, `at_seconds` after the start."""

    index: int  # in the trace
    at_seconds: float
    tokens: list[int]
    max_tokens: int


def lines(trace: Trace, scale: Scale) -> tuple[list[Line], int]:
    """What to send, in order, and how many lines of the trace were too long."""
    sent: list[Line] = []
    num_too_long = 0
    first = trace.requests[0].timestamp if trace.requests else 0
    for index, request in enumerate(trace.requests):
        num_tokens = _scaled(request.input_length, scale)
        num_outputs = max(1, round(_scaled(request.output_length, scale) * scale.output_share))
        if scale.max_tokens and num_tokens + num_outputs > scale.max_tokens:
            num_too_long += 1
            continue
        at_seconds = (request.timestamp - first) / 1000.0 / scale.speed
        sent.append(Line(index, at_seconds, prompt(request, scale), num_outputs))
    return sent, num_too_long


def prompt(request: TraceRequest, scale: Scale) -> list[int]:
    """Token ids. Prompts share a prefix exactly as far as the blocks of the trace do."""
    tokens: list[int] = []
    for block in request.hash_ids:
        tokens += block_tokens(block, scale)
    return tokens[: _scaled(request.input_length, scale)]


def block_tokens(block: int, scale: Scale) -> list[int]:
    """The tokens that stand for block `block`: different for different ids, but for blocks shorter than its digits."""
    digits = []
    for _ in range(_ID_TOKENS):
        block, digit = divmod(block, scale.vocab_size)
        digits.append(digit)
    return [digits[i % _ID_TOKENS] for i in range(scale.block_tokens)]


def _scaled(num_tokens: int, scale: Scale) -> int:
    return max(1, -(-num_tokens * scale.block_tokens // BLOCK_TOKENS))

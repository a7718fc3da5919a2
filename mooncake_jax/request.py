"""One frozen record per hop of a request's life: Request → Placement → StagingHandle → FirstToken → TokenEvent.

Roles (frontend, Conductor, prefill, decode) share these records and the service tables of `mooncake_jax.messages`,
and nothing else. All times are seconds, all sizes bytes (`nbytes`) or tokens.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from kvstore.transfer.segment import Segment
from models.draw import MAX_BIASES, MAX_TOP

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Nbytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MAX_PROMPT_TOKENS = 1 << 20

FinishReason = Literal["stop", "length"]


class Bias(msgspec.Struct, frozen=True):
    """`amount` is added to the logit of `token` while fewer than `until` tokens are drawn; None: always."""

    token: TokenId
    amount: Annotated[float, Meta(ge=-1e30, le=1e30)]
    until: Count | None = None


class Sampling(msgspec.Struct, frozen=True):
    """How a token is drawn; `models.sampling` says in which order.

    `temperature` 0 is greedy; the key of step i is f(`seed`, i), never the slot. Presence and frequency penalties
    count the answer's tokens, the repetition penalty the prompt's as well.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: no limit
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] = 1.0
    biases: Annotated[list[Bias], Meta(max_length=MAX_BIASES)] = []
    num_top: Annotated[int, Meta(ge=0, le=MAX_TOP)] = 0  # most likely tokens to tell with every drawn one

    @property
    def looks_back(self) -> bool:
        """Whether earlier tokens matter, other than through the model."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class Request(msgspec.Struct, frozen=True):
    """A validated, tokenised request, as it leaves the frontend."""

    request_id: Name
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    sampling: Sampling = Sampling()
    # any of these ends the text; empty: none does
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] = []
    salt: Annotated[str, Meta(max_length=1024)] = ""  # the tenant's; part of every block key
    # every prompt token's log probability is wanted: all of it is computed, nothing reused
    score_prompt: bool = False


class Instance(msgspec.Struct, frozen=True):
    """One process of one role, recognised by its random `epoch` and not by its address alone."""

    name: Name
    address: Name  # gRPC host:port
    epoch: Epoch


class Placement(msgspec.Struct, frozen=True):
    """What the Conductor decided (Algorithm 1): the pair, and where the prefix comes from."""

    request_id: Name
    prefill: Instance
    decode: Instance
    keys: list[bytes]  # of the prompt's full blocks, in order; prefill re-derives and compares them
    local_blocks: Count  # leading blocks expected in the prefill instance's home DRAM
    fetch_blocks: Count  # leading blocks to have after fetching from `fetch_from` (0: nothing to fetch)
    fetch_from: str  # store node that holds them; "" if none
    ttft_forecast_seconds: Seconds
    tbt_forecast_seconds: Seconds


class StagingHandle(msgspec.Struct, frozen=True):
    """The region of a decode instance's registered memory that a prefill instance streams one request's KV into.

    Layout at `offset` of `segment`: flags `[num_blocks, num_groups, 2]` as little-endian u32 (generation, crc32 of that
    block's layer group), padded to 4096 bytes; then `num_blocks` blocks in the one block layout. A (block, group) has
    arrived when its flag carries this handle's generation; decode checks bytes against the crc before use.
    The memory may be another's when for `lease_seconds` no KV has arrived and nobody has asked for it.
    """

    instance: Name
    epoch: Epoch
    slot: Count
    generation: Annotated[int, Meta(ge=1, lt=2**32)]
    segment: Segment
    offset: Nbytes
    num_blocks: Count
    lease_seconds: Seconds


class PrefillRequest(msgspec.Struct, frozen=True):
    """Frontend → prefill: compute this prompt, stream its KV to `staging`. Without staging: fill the store only."""

    request: Request
    placement: Placement
    staging: StagingHandle | None


TopToken = tuple[TokenId, float]  # with its log probability


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Of every prompt token but the first, in order: its log probability, and the `num_top` most likely ones at its
    place.

    Arrays, as little-endian bytes: there may be hundreds of thousands of numbers, which no one unpacks on the way.
    """

    num_top: Annotated[int, Meta(ge=0, le=MAX_TOP)]
    logprobs: bytes  # float32 [T]
    top_tokens: bytes  # int32 [T, num_top]
    top_logprobs: bytes  # float32 [T, num_top]

    def __post_init__(self) -> None:
        size = len(self.logprobs)
        if size % 4 or not len(self.top_tokens) == len(self.top_logprobs) == size * self.num_top:
            raise ValueError(
                f"prompt log probabilities: {size}, {len(self.top_tokens)} and {len(self.top_logprobs)} bytes do not"
                f" make places with {self.num_top} most likely tokens each"
            )

    @classmethod
    def of(
        cls, logprobs: np.ndarray, top_tokens: np.ndarray, top_logprobs: np.ndarray, num_top: int
    ) -> PromptLogprobs:
        """Of arrays `[T]`, `[T, ≥ num_top]` and `[T, ≥ num_top]`, whose first columns are the most likely."""
        return cls(
            num_top,
            logprobs.astype("<f4").tobytes(),
            top_tokens[:, :num_top].astype("<i4").tobytes(),
            top_logprobs[:, :num_top].astype("<f4").tobytes(),
        )

    def unpacked(self) -> tuple[list[float], list[list[TopToken]]]:
        """Log probabilities, and the most likely tokens of each place. Takes a while where there are many."""
        logprobs = np.frombuffer(self.logprobs, "<f4").tolist()
        shape = (len(logprobs), self.num_top)
        tokens = np.frombuffer(self.top_tokens, "<i4").reshape(shape)
        best = np.frombuffer(self.top_logprobs, "<f4").reshape(shape)
        return logprobs, [
            list(zip(ids.tolist(), row.tolist(), strict=True)) for ids, row in zip(tokens, best, strict=True)
        ]


class FirstToken(msgspec.Struct, frozen=True, tag="first_token"):
    """Prefill → frontend, as soon as the first token is sampled (KV may still be on its way to decode)."""

    token: TokenId
    logprob: float
    cached_tokens: Count  # prompt tokens whose KV was reused, wherever it came from
    fetched_tokens: Count  # of these, the ones that came from another node
    top: list[TopToken] = []  # `Sampling.num_top` of them
    prompt: PromptLogprobs | None = None  # if `Request.score_prompt`


class PrefillDone(msgspec.Struct, frozen=True, tag="prefill_done"):
    """Prefill → frontend, when everything promised has arrived at decode."""

    queue_seconds: Seconds  # until the first token, less `prefill_seconds`: before its tiles and between them
    prefill_seconds: Seconds  # its own tiles until the first token
    # from the first token to the last byte at decode: transfer that was not hidden
    stream_tail_seconds: Seconds
    streamed_nbytes: Nbytes


PrefillEvent = FirstToken | PrefillDone


class ReserveRequest(msgspec.Struct, frozen=True):
    """Frontend → decode: hold staging memory and a place in the batch for a prompt of `prompt_tokens`."""

    request_id: Name
    epoch: Epoch
    prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]


class DecodeRequest(msgspec.Struct, frozen=True):
    """Frontend → decode: go on from `first_token` with the KV behind `handle`. A handle is good once."""

    request: Request
    handle: StagingHandle
    first_token: TokenId


class TokenEvent(msgspec.Struct, frozen=True):
    """Decode → frontend: the next tokens with their log probabilities; `finish` is set on the last event.

    `tops` has one entry per token, or none at all where nobody asked.
    """

    tokens: list[TokenId]
    logprobs: list[float]
    finish: FinishReason | None = None
    tops: list[list[TopToken]] = []

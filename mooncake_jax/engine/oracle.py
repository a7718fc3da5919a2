"""The oracle: one process, one request at a time, no store, no reuse. Served answers are held against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from models import draw as draws
from mooncake_jax.engine.contract import BatchRows, DecodeEngine, GroupKV, PromptScores, Sampled
from mooncake_jax.engine.draw_rows import fill
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine
from mooncake_jax.engine.prompt_logprobs import prompt_logprobs
from mooncake_jax.equality import TokenScores
from mooncake_jax.request import FinishReason, PromptLogprobs, Request, TopToken


class Answer(NamedTuple):
    """A whole answer. A stop token is its last token, with finish "stop"; it is no part of the text."""

    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None  # None: cancelled
    prompt: PromptLogprobs | None = None  # if the request asks for them


class Monolith:
    """Both engines in one thread: prefill draws token 0 of the answer, decode goes on. Uses slot 0 of each.

    Meets the same two engines as the served path, and nothing else of it: no store, no stream, no batch
    mates.
    """

    def __init__(self, prefill: JaxPrefillEngine, decode: DecodeEngine) -> None:
        if prefill.format != decode.format or prefill.fingerprint != decode.fingerprint:
            raise ValueError("prefill and decode engines of different models cannot work together")
        self._prefill = prefill
        self._decode = decode

    @property
    def max_tokens(self) -> int:
        """The longest prompt plus answer."""
        return min(self._prefill.max_tokens, self._decode.max_tokens)

    def warm_up(self) -> None:
        """Compile both engines; their `compiles_after_ready` count from here."""
        self._prefill.warm_up()
        self._decode.warm_up()
        self._prefill.warm_up()

    def generate(
        self,
        request: Request,
        on_token: Callable[[int, float, Sequence[TopToken]], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        on_prompt: Callable[[PromptLogprobs], None] | None = None,
    ) -> Answer:
        """Answer `request` from nothing.

        `on_token` hears every token, its log probability and the most likely ones; `on_prompt` hears the prompt's
        before them, if the request asks; `cancelled` is asked before every step. Raises ValueError if prompt and
        answer do not fit, or a token is out of range.
        """
        prompt = np.asarray(request.tokens, np.int32)
        if prompt.size + request.max_tokens > self.max_tokens:
            raise ValueError(
                f"{prompt.size} prompt tokens, {request.max_tokens} to come: room for {self.max_tokens}"
            )
        tokens: list[int] = []
        logprobs: list[float] = []

        def take(token: int, logprob: float, top: Sequence[TopToken]) -> FinishReason | None:
            tokens.append(token)
            logprobs.append(logprob)
            if on_token is not None:
                on_token(token, logprob, top)
            if token in request.stop_token_ids:
                return "stop"
            return "length" if len(tokens) == request.max_tokens else None

        scores: list[PromptScores] = []
        first = self._compute_prompt(prompt, request, cancelled, scores)
        if first is None:
            return Answer(tokens, logprobs, None)
        told = None
        if request.score_prompt:
            told = prompt_logprobs(scores, request.sampling.num_top)
            if on_prompt is not None:
                on_prompt(told)
        finish = take(first.token, first.logprob, first.top)
        if request.sampling.looks_back and finish is None:
            self._decode.remember(0, request.tokens, tokens)
        while finish is None:
            if cancelled is not None and cancelled():
                break
            rows = self._rows(request, tokens[-1], position=prompt.size + len(tokens) - 1, step=len(tokens))
            step = self._decode.generate(rows)
            top = step.top(0, request.sampling.num_top)
            finish = take(int(step.tokens[0]), float(step.logprobs[0]), top)
        return Answer(tokens, logprobs, finish, told)

    def score(self, prompt_tokens: Sequence[int], answer_tokens: Sequence[int]) -> TokenScores:
        """Teacher-forced scores of every answer token, `[T]`."""
        if not len(prompt_tokens) or not len(answer_tokens):
            raise ValueError("scoring needs at least one prompt token and one answer token")
        sequence = np.asarray([*prompt_tokens, *answer_tokens], np.int32)
        inputs, targets = sequence[:-1], sequence[1:]
        step, num_given = self._prefill.tile_tokens, len(prompt_tokens) - 1
        first_scored = num_given // step * step
        tiles: list[PromptScores] = []
        for start in range(0, inputs.size, step):
            wanted = targets[start : start + step] if start >= first_scored else None
            for item in self._prefill.prefill(0, inputs[start : start + step], start, targets=wanted):
                if isinstance(item, PromptScores):
                    tiles.append(item)
        logprobs, top_tokens, top_logprobs = (
            np.concatenate(parts)[num_given - first_scored :] for parts in zip(*tiles, strict=True)
        )
        return TokenScores(logprobs, top_tokens[:, 0], top_logprobs[:, 0] - top_logprobs[:, 1])

    def _compute_prompt(
        self,
        prompt: np.ndarray,
        request: Request,
        cancelled: Callable[[], bool] | None,
        scores: list[PromptScores],
    ) -> Sampled | None:
        """Prefill the prompt and put its KV into decode; None if cancelled."""
        form, step = self._prefill.format, self._prefill.tile_tokens
        blocks = np.zeros((form.num_blocks(prompt.size), *form.shape), form.item_dtype)
        first: Sampled | None = None
        for start in range(0, prompt.size, step):
            if cancelled is not None and cancelled():
                return None
            tile = prompt[start : start + step]
            sample = request.sampling if start + step >= prompt.size else None
            targets = prompt[start + 1 : start + step + 1] if request.score_prompt else prompt[:0]
            for item in self._prefill.prefill(
                0, tile, start, sample=sample, prompt=prompt, targets=targets if targets.size else None
            ):
                if isinstance(item, GroupKV):
                    layers = slice(
                        item.group * form.layers_per_group, (item.group + 1) * form.layers_per_group
                    )
                    blocks[item.first_block : item.first_block + len(item.blocks), layers] = item.blocks
                elif isinstance(item, PromptScores):
                    scores.append(item)
                else:
                    first = item
        for start in range(0, len(blocks), self._decode.insert_blocks):
            self._decode.insert(0, start, blocks[start : start + self._decode.insert_blocks])
        return first

    def _rows(self, request: Request, token: int, *, position: int, step: int) -> BatchRows:
        slots = self._decode.num_slots
        draw = draws.blank(slots)
        fill(draw, 0, request.sampling)
        draw.step[0] = step
        return BatchRows(
            active=np.arange(slots) == 0,
            tokens=np.full(slots, token, np.int32),
            positions=np.full(slots, position, np.int32),
            draw=draw,
        )

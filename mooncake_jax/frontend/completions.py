"""`/v1/completions`: how answers are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake_jax.frontend.answer import Answer, extensions, usage
from mooncake_jax.frontend.job import Job
from mooncake_jax.frontend.text import Delta, token_name

ID_PREFIX = "cmpl"


class CompletionWriter:
    """Text completions, whole or in chunks."""

    def __init__(self, job: Job, token_bytes: Callable[[int], bytes]):
        self._job, self._token_bytes = job, token_bytes
        self._offsets = [0] * len(job.choices)  # characters of pieces already written, of each answer

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self._choice(answer, answer.whole()) for answer in answers]
        if self._job.return_token_ids and len(self._job.prompts) > 1:
            for choice, answer in zip(choices, answers, strict=True):
                choice["prompt_token_ids"] = answer.choice.prompt.tokens
        envelope = self._envelope(choices) | {"usage": usage(self._job, answers)}
        return envelope | extensions(self._job, answers[0])

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        return []

    def chunk(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        return self._envelope([self._choice(answer, delta)])

    def usage(self, answers: list[Answer]) -> dict[str, Any]:
        return self._envelope([]) | {"usage": usage(self._job, answers)}

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._job.envelope("text_completion", choices)

    def _choice(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        index = answer.choice.index
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish,
        }
        if self._job.num_logprobs is not None:
            offsets = []
            for piece in delta.pieces:
                offsets.append(self._offsets[index])
                self._offsets[index] += len(piece)
            choice["logprobs"] = {
                "tokens": [self._name(token) for token in delta.tokens],
                "token_logprobs": delta.logprobs,
                "top_logprobs": self._tops(delta) if self._job.num_logprobs else None,
                "text_offset": offsets,
            }
        if self._job.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice

    def _tops(self, delta: Delta) -> list[dict[str, float] | None]:
        """By name, the most likely tokens and the one that stands there."""
        told = []
        for token, logprob, top in zip(delta.tokens, delta.logprobs, delta.tops, strict=True):
            if top is None or logprob is None:
                told.append(None)
                continue
            # of tokens with one name, the most likely
            told.append(
                {self._name(id_): p for id_, p in sorted([*top, (token, logprob)], key=lambda t: t[1])}
            )
        return told

    def _name(self, token: int) -> str:
        return token_name(token, self._token_bytes(token))

"""`/v1/completions`: how an answer is written."""

from __future__ import annotations

from typing import Any

from mooncake_jax.frontend.answer import Answer
from mooncake_jax.frontend.job import Job
from mooncake_jax.frontend.text import Delta

ID_PREFIX = "cmpl"


class CompletionWriter:
    """Text completions, whole or in chunks."""

    def __init__(self, job: Job):
        self._job = job
        self._offset = 0  # characters of pieces already written

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = self._choice(
            "".join(answer.text), answer.tokens, answer.pieces, answer.logprobs, answer.finish
        )
        return self._envelope([choice]) | {"usage": answer.usage()} | answer.extensions()

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._envelope(
            [self._choice(delta.text, delta.tokens, delta.pieces, delta.logprobs, delta.finish)]
        )

    def usage(self, answer: Answer) -> dict[str, Any]:
        return self._envelope([]) | {"usage": answer.usage()}

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._job.envelope("text_completion", choices)

    def _choice(
        self, text: str, tokens: list[int], pieces: list[str], logprobs: list[float], finish: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        if self._job.logprobs:
            offsets = []
            for piece in pieces:
                offsets.append(self._offset)
                self._offset += len(piece)
            choice["logprobs"] = {
                "tokens": pieces,
                "token_logprobs": logprobs,
                "top_logprobs": None,
                "text_offset": offsets,
            }
        if self._job.return_token_ids:
            choice["token_ids"] = tokens
        return choice

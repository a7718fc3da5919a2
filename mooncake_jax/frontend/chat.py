"""`/v1/chat/completions`: how an answer is written."""

from __future__ import annotations

from typing import Any

from mooncake_jax.frontend.answer import Answer
from mooncake_jax.frontend.job import Job
from mooncake_jax.frontend.text import Delta

ID_PREFIX = "chatcmpl"


class ChatWriter:
    """Chat completions, whole or in chunks."""

    def __init__(self, job: Job):
        self._job = job

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(answer.text)}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish}
        choice |= self._details(answer.tokens, answer.pieces, answer.logprobs)
        envelope = self._job.envelope("chat.completion", [choice])
        return envelope | {"usage": answer.usage()} | answer.extensions()

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text: who speaks."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self._job.envelope("chat.completion.chunk", [choice])]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        said = {"content": delta.text} if delta.text else {}
        choice = {"index": 0, "delta": said, "finish_reason": delta.finish}
        choice |= self._details(delta.tokens, delta.pieces, delta.logprobs)
        return self._job.envelope("chat.completion.chunk", [choice])

    def usage(self, answer: Answer) -> dict[str, Any]:
        return self._job.envelope("chat.completion.chunk", []) | {"usage": answer.usage()}

    def _details(self, tokens: list[int], pieces: list[str], logprobs: list[float]) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self._job.logprobs:
            content = [
                {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, logprob in zip(pieces, logprobs, strict=True)
            ]
            details["logprobs"] = {"content": content}
        if self._job.return_token_ids:
            details["token_ids"] = tokens
        return details

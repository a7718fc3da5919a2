"""`/v1/chat/completions`: how answers are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake_jax.frontend.answer import Answer, extensions, usage
from mooncake_jax.frontend.job import Job
from mooncake_jax.frontend.text import Delta, token_name

ID_PREFIX = "chatcmpl"


class ChatWriter:
    """Chat completions, whole or in chunks."""

    def __init__(self, job: Job, token_bytes: Callable[[int], bytes]):
        self._job, self._token_bytes = job, token_bytes

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            message = {"role": "assistant", "content": "".join(answer.text), "refusal": None}
            choice = {"index": answer.choice.index, "message": message, "finish_reason": answer.finish}
            choices.append(choice | self._details(answer.whole()))
        envelope = self._job.envelope("chat.completion", choices) | {"usage": usage(self._job, answers)}
        return envelope | extensions(self._job, answers[0])

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        """Chunks before the first text: who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": answer.choice.index, "delta": delta, "finish_reason": None}
        return [self._job.envelope("chat.completion.chunk", [choice])]

    def chunk(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        said = {"content": delta.text} if delta.text else {}
        choice = {"index": answer.choice.index, "delta": said, "finish_reason": delta.finish}
        return self._job.envelope("chat.completion.chunk", [choice | self._details(delta)])

    def usage(self, answers: list[Answer]) -> dict[str, Any]:
        return self._job.envelope("chat.completion.chunk", []) | {"usage": usage(self._job, answers)}

    def _details(self, delta: Delta) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self._job.num_logprobs is not None:
            tops = delta.tops or [[]] * len(delta.tokens)
            content = [
                self._token(token, logprob) | {"top_logprobs": [self._token(*one) for one in top or []]}
                for token, logprob, top in zip(delta.tokens, delta.logprobs, tops, strict=True)
            ]
            details["logprobs"] = {"content": content, "refusal": None}
        if self._job.return_token_ids:
            details["token_ids"] = delta.tokens
        return details

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._token_bytes(token)
        return {"token": token_name(token, raw), "logprob": logprob, "bytes": list(raw)}

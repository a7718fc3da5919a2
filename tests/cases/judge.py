"""What every case is judged by: the oracle's answer, the canary, and no success that is not one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from e2e.cluster import Answer, LocalCluster
from e2e.real import CFG

from kvstore.errors import StoreError
from mooncake_jax.engine.oracle import Monolith
from mooncake_jax.equality import compare

CANARY = [(7 * i + 3) % CFG.vocab_size for i in range(50)]
MAX_TOKENS = 6


def text(length: int, seed: int = 0) -> list[int]:
    """A prompt of random tokens; of one seed, the shorter is the beginning of the longer."""
    return np.random.default_rng(seed).integers(0, CFG.vocab_size, CFG.max_position).tolist()[:length]


@dataclass(frozen=True)
class Judge:
    """Compares with one process that answers one request at a time, and reuses nothing."""

    oracle: Monolith

    def violation(
        self, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], *, greedy: bool = True
    ) -> str | None:
        """Why the answer does not equal the oracle's; None if it does."""
        scores = self.oracle.score(prompt, tokens)
        return compare(tokens, logprobs, scores, "float32", greedy=greedy).first_violation

    def right(self, prompt: Sequence[int], answer: Answer, max_tokens: int = MAX_TOKENS) -> None:
        assert len(answer.tokens) == max_tokens
        assert self.violation(prompt, answer.tokens, answer.logprobs) is None

    def right_reply(
        self,
        prompt: Sequence[int],
        reply: tuple[int, dict[str, Any]],
        max_tokens: int = MAX_TOKENS,
        *,
        greedy: bool = True,
    ) -> None:
        """As `right`, for an answer over HTTP to a request with `logprobs` 0."""
        status, body = reply
        assert status == 200, body
        choice = body["choices"][0]
        assert len(choice["token_ids"]) == max_tokens
        logprobs = choice["logprobs"]["token_logprobs"]
        assert self.violation(prompt, choice["token_ids"], logprobs, greedy=greedy) is None

    def right_or_error(
        self, prompt: Sequence[int], ask: Any, max_tokens: int = MAX_TOKENS
    ) -> StoreError | None:
        """Runs `ask` and returns its error; without one, its answer must be right."""
        try:
            answer = ask()
        except StoreError as error:
            return error
        self.right(prompt, answer, max_tokens)
        return None

    def canary(self, cluster: LocalCluster) -> None:
        """Everything is free, and a fixed request gets its answer."""
        cluster.check_idle()
        self.right(CANARY, cluster.ask(CANARY, MAX_TOKENS))
        cluster.check_idle()


def refused(reply: tuple[int, dict[str, Any]], *statuses: int) -> str:
    """The message of an error that names itself, in OpenAI's shape."""
    status, body = reply
    assert status in statuses, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]["message"]

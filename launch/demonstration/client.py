"""Asks the cluster through HTTP, as anybody would, and keeps what it takes to check the answers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

HEARTBEAT_SECONDS = 1.0
Message = dict[str, str]


class DemoError(Exception):
    """The cluster did not answer as it should."""


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    id: str
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    text: str
    cached_tokens: int
    fetched_tokens: int
    prefill: str
    decode: str
    ttft_seconds: float


class Client:
    """Greedy chats with one cluster."""

    def __init__(self, url: str, model: str):
        self._url, self._model = url, model

    def chat(self, id: str, messages: list[Message], max_tokens: int, avoid: Sequence[str] = ()) -> Exchange:
        """Raises DemoError with the server's message if there is no answer."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "return_token_ids": True,
            "mooncake_avoid": list(avoid),
        }
        reply = json.loads(self._call("/v1/chat/completions", json.dumps(body).encode()))
        choice, route = reply["choices"][0], reply["mooncake"]
        return Exchange(
            id=id,
            prompt=reply["prompt_token_ids"],
            answer=choice["token_ids"],
            logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
            text=choice["message"]["content"],
            cached_tokens=route["cached_tokens"],
            fetched_tokens=route["fetched_tokens"],
            prefill=route["prefill"],
            decode=route["decode"],
            ttft_seconds=route["ttft_seconds"],
        )

    def settled_counters(self) -> tuple[dict[str, int], int]:
        """`moved_nbytes` and `compiles_after_ready`, once the instances' heartbeats add nothing more."""
        before = None
        while before != (now := (self.moved_nbytes(), self.compiles_after_ready())):
            before = now
            time.sleep(2 * HEARTBEAT_SECONDS)
        return now

    def moved_nbytes(self) -> dict[str, int]:
        """Bytes that the instances moved so far, by path."""
        moved = {"shm": 0, "tcp": 0}
        for path, value in self._samples("mooncake_moved_bytes", "path"):
            if path in moved:
                moved[path] += int(value)
        return moved

    def compiles_after_ready(self) -> int:
        """Of all instances."""
        return int(sum(v for _, v in self._samples("mooncake_instance_compiles_after_ready", "instance")))

    def _samples(self, name: str, label: str) -> list[tuple[str, float]]:
        families = text_string_to_metric_families(self._call("/metrics").decode())
        return [(s.labels[label], s.value) for family in families for s in family.samples if s.name == name]

    def _call(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            raise DemoError(f"{path}: {error.code} {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise DemoError(f"{path}: {error}") from error

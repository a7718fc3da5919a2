"""A real trace whose requests are longer than the model: those are refused and counted, all others answered.

Of Mooncake's published traces; skipped where they are not (the environment variable MOONCAKE_TRACES).
"""

from __future__ import annotations

import http.client
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.answers import ByteTokenizer, ScriptedBackend

from mooncake_jax.frontend.app import build_app
from mooncake_jax.frontend.config import FrontendConfig
from mooncake_jax.frontend.server import HttpServer

TRACES = Path(os.environ.get("MOONCAKE_TRACES") or Path(__file__).parents[3] / "shared/traces")
NUM_LINES, LIMIT = 500, 8192


def read(name: str) -> list[dict]:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with path.open() as lines:
        return [json.loads(line) for _, line in zip(range(NUM_LINES), lines, strict=False)]


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_trace_as_fast_as_it_goes(name):
    requests = read(name)
    backend = ScriptedBackend("x" * 2000, step=2000, max_tokens=LIMIT, eos=False)
    config = FrontendConfig("fake", ByteTokenizer.vocab_size)
    server = HttpServer(lambda: build_app(config, ByteTokenizer(), backend))

    def ask(request: dict) -> tuple[int, dict]:
        num_tokens = request["input_length"]
        prompt = [i % 256 for i in request["hash_ids"] for _ in range(512)][:num_tokens]
        body = {"model": "fake", "prompt": prompt, "max_tokens": max(1, request["output_length"])}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    try:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(ask, requests))
    finally:
        server.close()
    refused = 0
    for request, (status, body) in zip(requests, replies, strict=True):
        num_prompt, num_answer = request["input_length"], max(1, request["output_length"])
        if num_prompt + num_answer > LIMIT:
            refused += 1
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert str(num_prompt) in body["error"]["message"]
            assert str(LIMIT) in body["error"]["message"]
        else:
            assert status == 200, body
            usage = body["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_answer)
    assert 0 < refused < len(requests)
    assert len(backend.requests) == len(requests) - refused
    assert backend.num_open == 0

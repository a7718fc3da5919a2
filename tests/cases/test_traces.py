"""A real trace whose requests are longer than the model: those are refused and counted, all others answered; and our own
load generator, which sends every line at its time whatever became of the others.

Of Mooncake's published traces; skipped where they are not (the environment variable MOONCAKE_TRACES).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.answers import ByteTokenizer, ScriptedBackend

from launch.replaying.outcome import Slo, summarize
from launch.replaying.prompts import Scale, lines
from launch.replaying.targets import OpenAITarget, replay
from mooncake_jax.frontend.app import build_app
from mooncake_jax.frontend.config import FrontendConfig
from mooncake_jax.frontend.server import HttpServer
from mooncake_jax.trace import read_trace

TRACES = Path(os.environ.get("MOONCAKE_TRACES") or Path(__file__).parents[3] / "shared/traces")
NUM_LINES, LIMIT = 500, 8192


NUM_REPLAYED = 150


def path_of(name: str) -> Path:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


def read(name: str) -> list[dict]:
    with path_of(name).open() as lines:
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


class Gate(ScriptedBackend):
    """Answers nothing until `num` requests are there: who waits for answers never gets that far."""

    def __init__(self, num: int):
        super().__init__("x" * 2000, step=2000, max_tokens=LIMIT, eos=False)
        self._num, self._all_here = num, asyncio.Event()

    async def generate(self, request, avoid=()):
        if len(self.requests) + 1 == self._num:
            self._all_here.set()
        async for event in super().generate(request, avoid):
            await asyncio.wait_for(self._all_here.wait(), 120)
            yield event


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("speed", [50.0, 1000.0])
def test_the_load_generator_sends_every_line_at_its_time_and_counts_each(name, speed):
    trace = read_trace(path_of(name), NUM_REPLAYED)
    sent, num_left_out = lines(trace, Scale(speed=speed))
    assert (len(sent), num_left_out) == (NUM_REPLAYED, 0)
    fits = [len(line.tokens) + line.max_tokens <= LIMIT for line in sent]
    assert 0 < sum(fits) < NUM_REPLAYED
    backend = Gate(sum(fits))
    config = FrontendConfig("fake", ByteTokenizer.vocab_size)
    server = HttpServer(lambda: build_app(config, ByteTokenizer(), backend))
    try:
        outcomes = asyncio.run(
            replay(OpenAITarget(f"http://{server.address}", "fake"), sent, lambda one: None)
        )
    finally:
        server.close()
    for line, fit, outcome in zip(sent, fits, outcomes, strict=True):
        assert (outcome.index, outcome.at_seconds) == (line.index, line.at_seconds)
        assert outcome.status == ("ok" if fit else "failed"), outcome
        if fit:
            assert outcome.output_tokens == line.max_tokens
        else:
            assert outcome.error.startswith("400")
            assert str(len(line.tokens)) in outcome.error
            assert str(LIMIT) in outcome.error
    last_ms = trace.requests[-1].timestamp - trace.requests[0].timestamp
    assert outcomes[-1].at_seconds == pytest.approx(last_ms / 1000 / speed)
    summary = summarize(outcomes, Slo())
    counts = (summary.num_arrivals, summary.num_ok, summary.num_rejected, summary.num_failed)
    assert counts == (NUM_REPLAYED, sum(fits), 0, NUM_REPLAYED - sum(fits))
    assert summary.goodput == sum(fits) / NUM_REPLAYED
    assert f"lag: p99 {summary.lag_p99:.3f} s" in summary.text()
    left_out, num_left_out = lines(trace, Scale(max_tokens=LIMIT))
    assert (len(left_out), num_left_out) == (sum(fits), NUM_REPLAYED - sum(fits))
    assert backend.num_open == 0

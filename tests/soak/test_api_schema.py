"""Schemathesis against the served OpenAPI document: whatever the schema allows is answered as the schema says.

Two checks are ours. What keeps to the schema is answered with 200, or refused by a rule that a schema cannot say
(`BEYOND_SCHEMA`): about fields together, or keys that must be token ids. What breaks it is refused with 400 and an
error that names the field.
"""

from __future__ import annotations

import http.client
import json

import pytest
from fakes.answers import ByteTokenizer, ScriptedBackend
from hypothesis import HealthCheck, Phase, given, settings

from mooncake_jax.frontend.app import build_app
from mooncake_jax.frontend.config import FrontendConfig
from mooncake_jax.frontend.openapi import document
from mooncake_jax.frontend.server import HttpServer

schemathesis = pytest.importorskip("schemathesis")

pytestmark = pytest.mark.soak
CONFIG = FrontendConfig("fake", ByteTokenizer.vocab_size)
NUM_CASES = {"/v1/completions": 700, "/v1/chat/completions": 700, "/tokenize": 150, "/detokenize": 150}
BEYOND_SCHEMA = ("conflicting_fields", "context_length_exceeded", "invalid_messages", "unknown_token")


@pytest.fixture(scope="module")
def server():
    backend = ScriptedBackend("Zwölf Boxkämpfer", max_tokens=100_000)
    server = HttpServer(lambda: build_app(CONFIG, ByteTokenizer(), backend))
    yield server
    server.close()
    assert backend.num_open == 0


def canary(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        body = json.dumps({"model": "fake", "prompt": "hi", "max_tokens": 100})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "Zwölf Boxkämpfer"
    finally:
        connection.close()


def _with_integers(value):
    """To a schema, 1.0 is an integer; to us it is not."""
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("path", NUM_CASES)
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.filterwarnings("ignore")  # of the libraries behind schemathesis
def test_the_schema_is_what_is_served(server, path, mode):
    schema = schemathesis.openapi.from_dict(document(CONFIG))
    operation = schema[path]["POST"]
    generation = schemathesis.GenerationMode(mode)
    seen: dict[int, int] = {}

    @given(case=operation.as_strategy(generation_mode=generation))
    @settings(
        max_examples=NUM_CASES[path],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        if mode == "positive":
            case.body = _with_integers(case.body)
        response = case.call(base_url=f"http://127.0.0.1:{server.port}", timeout=20)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        case.validate_response(response, excluded_checks=[schemathesis.checks.positive_data_acceptance])
        if response.status_code != 200:
            error = response.json()["error"]
            assert response.status_code < 500, error
            assert mode == "negative" or error["code"] in BEYOND_SCHEMA, error

    run()
    canary(server)
    assert sum(seen.values()) >= NUM_CASES[path] * 0.9, seen
    assert seen.get(200 if mode == "positive" else 400, 0) > NUM_CASES[path] / 4, seen

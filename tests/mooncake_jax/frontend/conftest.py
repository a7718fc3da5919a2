"""A frontend over HTTP, with a scripted backend behind it."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import contextmanager

import pytest
from fakes.answers import ByteTokenizer

from mooncake_jax.frontend.app import build_app
from mooncake_jax.frontend.config import FrontendConfig
from mooncake_jax.frontend.server import HttpServer

MODEL = "fake"


class Client:
    """One connection per request; `post` gives (status, headers, parsed body)."""

    def __init__(self, server):
        self.server, self.port = server, server.port

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, body, **headers):
        raw = body if isinstance(body, bytes) else json.dumps({"model": MODEL} | body).encode()
        headers = {"Content-Type": "application/json"} | headers
        status, got, reply = self.request("POST", path, raw, headers)
        if got.get("Content-Type", "").startswith("application/json"):
            return status, got, json.loads(reply)
        return status, got, reply

    def post_for(self, seconds, path, body):
        """Hangs up after `seconds`. Raises TimeoutError if there was no answer by then."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            raw = json.dumps({"model": MODEL} | body)
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            return connection.getresponse().status
        finally:
            connection.close()

    def complete(self, prompt="hi", **fields):
        status, _, body = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 100} | fields)
        assert status == 200, body
        return body

    def stream(self, path="/v1/completions", **fields):
        """The parsed events; the closing `[DONE]` must be there."""
        fields = {"max_tokens": 100, "stream": True} | fields
        if path == "/v1/completions":
            fields = {"prompt": "hi"} | fields
        status, headers, raw = self.post(path, fields)
        assert status == 200, raw
        assert headers["Content-Type"].startswith("text/event-stream")
        events = raw.decode().split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def frontend_over(backend, tokenizer=None, **config):
    tokenizer = tokenizer or ByteTokenizer()
    settings = FrontendConfig(MODEL, tokenizer.vocab_size, **config)
    server = HttpServer(lambda: build_app(settings, tokenizer, backend))
    try:
        yield Client(server)
        deadline = time.monotonic() + 10
        while backend.num_open and time.monotonic() < deadline:
            time.sleep(0.005)
        assert backend.num_open == 0, "a request is still open at the backend"
    finally:
        server.close()


@pytest.fixture
def serve():
    """`with serve(backend) as client:`; at its end nothing may be open."""
    return frontend_over

"""The HTTP frontend over a `LocalCluster`: what a client sees, with engines whose answers are known."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from e2e.cluster import LocalCluster, wait_until
from fakes.answers import ByteTokenizer
from fakes.engine import answer

from mooncake_jax.frontend.app import build_app
from mooncake_jax.frontend.config import FrontendConfig
from mooncake_jax.frontend.dispatch import Dispatcher
from mooncake_jax.frontend.server import HttpServer
from mooncake_jax.frontend.text import Tokenizer


class HttpFrontend:
    """Asks by token ids, with no end token, so that an answer is `fakes.engine.answer`."""

    def __init__(self, port: int):
        self.port = port

    def ask(self, tokens, max_tokens=6, **fields):
        """(status, body)"""
        status, raw = self.request(*self._request(tokens, max_tokens, fields))
        return status, json.loads(raw)

    def stream(self, tokens, max_tokens=6, **fields):
        """The events of a stream that must end well."""
        status, raw = self.request(*self._request(tokens, max_tokens, {"stream": True} | fields))
        assert status == 200, raw
        *events, done, end = raw.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def request(self, method, path, body=None, headers=None):
        """(status, raw body)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def leave(self, tokens, seconds, max_tokens=6, **fields):
        """Ask, and hang up after `seconds`; True if the whole answer had come by then."""
        method, path, body, headers = self._request(tokens, max_tokens, fields)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        raw = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            sock.sendall(raw)
            deadline, got = time.monotonic() + seconds, b""
            while (left := deadline - time.monotonic()) > 0:
                sock.settimeout(left)
                try:
                    part = sock.recv(4096)
                except TimeoutError:
                    break
                got += part
                if not part:
                    break
        return b"[DONE]" in got or b'"usage"' in got

    def _request(self, tokens, max_tokens, fields):
        body = {"model": "fake", "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True} | fields
        return "POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}


@contextmanager
def http_frontend(cluster: LocalCluster, tokenizer: Tokenizer | None = None, vocab_size: int | None = None):
    """`vocab_size` is the model's; both are those of the fakes if none are given."""
    dispatcher = Dispatcher(cluster.conductor.address)
    config = FrontendConfig("fake", vocab_size or ByteTokenizer.vocab_size)
    server = HttpServer(lambda: build_app(config, tokenizer or ByteTokenizer(), dispatcher))
    try:
        wait_until(lambda: dispatcher.max_tokens is not None, "the frontend is ready")
        yield HttpFrontend(server.port)
    finally:
        server.close()


def prompt(length, seed=0):
    return [(17 * i + 5 * seed + i * i) % 200 for i in range(length)]


def cancel_many(cluster, num_requests, seed):
    """Case 9: each client leaves at a random moment of its request; then all is free, and all goes on."""
    chance = random.Random(seed)
    with http_frontend(cluster) as frontend, ThreadPoolExecutor(16) as pool:

        def leave(i):
            moment = chance.choice((0.0, 0.002, 0.005, 0.02, 0.05)) * chance.random() * 2
            frontend.leave(prompt(chance.randrange(1, 120), i), moment, 50, stream=chance.random() < 0.5)

        list(pool.map(leave, range(num_requests)))
        cluster.check_idle()
        prompts = [prompt(20 + i, 1000 + i) for i in range(20)]
        for tokens, (status, body) in zip(prompts, pool.map(frontend.ask, prompts), strict=True):
            assert status == 200, body
            assert body["choices"][0]["token_ids"] == answer(tokens, 6)

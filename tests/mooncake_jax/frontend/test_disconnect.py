"""A client that leaves ends its request at the backend, streamed or not, wherever it was."""

import json
import socket
import time

import pytest
from fakes.answers import ScriptedBackend


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def leave_after(client, backend, *, stream, reads_a_token):
    body = json.dumps({"model": "fake", "prompt": "hi", "max_tokens": 100, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_for(lambda: backend.num_open == 1, "the request never reached the backend")
        if reads_a_token:
            received = b""
            while b"data: " not in received:
                received += sock.recv(4096)
    wait_for(lambda: backend.num_closed == 1, "the backend still works for a client that left")


@pytest.mark.parametrize(("stream", "hang_after"), [(False, 0), (False, 3), (True, 0), (True, 3)])
def test_leaving_cancels(serve, stream, hang_after):
    backend = ScriptedBackend("x" * 50, hang_after=hang_after)
    with serve(backend) as client:
        leave_after(client, backend, stream=stream, reads_a_token=stream and hang_after > 0)
        backend.hang_after = None
        assert client.complete()["choices"][0]["text"] == "x" * 50


def test_a_client_that_reads_nothing_more_counts_as_gone(serve, monkeypatch):
    monkeypatch.setattr("mooncake_jax.frontend.stream.UNREAD_SECONDS", 0.2)
    num_tokens = 400_000  # their events fill every buffer on the way
    backend = ScriptedBackend("x" * num_tokens, step=2000, max_tokens=2 * num_tokens)
    fields = {"model": "fake", "prompt": "hi", "max_tokens": num_tokens, "stream": True, "logprobs": 0}
    body = json.dumps(fields).encode()
    with serve(backend) as client, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", client.port))
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_for(lambda: backend.num_closed == 1, "the backend still works for a client that does not read")
        assert backend.num_sent < num_tokens
        wait_for(
            lambda: b"mooncake_requests_in_flight 0.0" in client.get("/metrics")[2], "it is still served"
        )


def test_closing_the_server_ends_what_runs(serve, monkeypatch):
    monkeypatch.setattr("mooncake_jax.frontend.server.GRACE_SECONDS", 0.05)
    backend = ScriptedBackend("x" * 50, hang_after=0)
    with serve(backend) as client:
        sock = socket.create_connection(("127.0.0.1", client.port), timeout=10)
        body = b'{"model":"fake","prompt":"hi"}'
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_for(lambda: backend.num_open == 1, "the request never reached the backend")
        client.server.close()
        wait_for(lambda: backend.num_open == 0, "the request outlived the server")
        sock.close()

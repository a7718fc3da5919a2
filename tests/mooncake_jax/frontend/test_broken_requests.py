"""Broken requests: 4xx in OpenAI's error shape that names the fault, never a 5xx, and the server goes on."""

import gzip
import json
import socket
import zlib

import pytest
from fakes.answers import ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = 200
CANARY = "canary"
COMPRESSED = {"gzip": gzip.compress, "deflate": zlib.compress}


def raw(**fields):
    return json.dumps({"model": "fake", "prompt": "hi"} | fields).encode()


def chat(**fields):
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


@pytest.fixture
def client(serve):
    backend = ScriptedBackend(CANARY, max_tokens=LIMIT)
    with serve(backend, max_body_nbytes=1 << 20) as client:
        client.backend = backend
        yield client
        before = len(backend.requests)
        assert client.complete()["choices"][0]["text"] == CANARY
        assert client.get("/health")[0] == 200
        assert before == 0, "a broken request reached the backend"


def check(reply, status, param, code=None):
    got, _, body = reply
    assert got == status, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param, error
    if code:
        assert error["code"] == code
    return error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{:",
        b"null",
        b"[]",
        b'"text"',
        '{"model":"fake","prompt":"你好"}'.encode("gbk"),
        b'{"model":"fake","prompt":"\\ud83d"}',
        b'{"model":"fake","prompt":"\\ude00 text behind it"}',
        b'{"model":"fake","prompt":"\xed\xa0\xbd"}',
        b'{"model":"fake","prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"model":"fake","prompt":"hi"} {}',
        b'{"model":"fake","prompt":"hi","temperature":NaN}',
        b'{"model":"fake","prompt":"hi","temperature":Infinity}',
        b"\xff\xfe" + "{}".encode("utf-16-le"),
    ],
    ids=lambda b: repr(b[:24]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_not_json_or_no_object(client, path, body):
    status, _, reply = client.post(path, body)
    assert status == 400, reply
    assert reply["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),  # more than the answer may have
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"user": []}, "user"),
        ({"logit_bias": {"257": 2}}, "logit_bias"),  # not in the vocabulary
        ({"logit_bias": {"one": 2}}, "logit_bias"),
        ({"logit_bias": {"-1": 2}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"1": None}}, "logit_bias[...]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [257]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1, [2]]]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"model": 5}, "model"),
        ({"mooncake_avoid": [""]}, "mooncake_avoid[0]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_field_is_named(client, fields, param):
    check(client.post(COMPLETIONS, raw(**fields)), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"prompt_cache_options": {}}, "prompt_cache_options"),
        ({"prompt": "hi"}, "prompt"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_chat_field_is_named(client, fields, param):
    check(client.post(CHAT, chat(**fields)), 400, param)


def test_a_missing_field_is_named(client):
    check(client.post(COMPLETIONS, b'{"model":"fake"}'), 400, "prompt")
    check(client.post(CHAT, b'{"model":"fake"}'), 400, "messages")
    check(client.post(COMPLETIONS, b'{"prompt":"hi"}'), 400, "model")


def test_a_huge_or_strange_name_is_told_in_short(client):
    name = "x" * 300_000
    assert len(check(client.post(COMPLETIONS, raw(**{name: 1})), 400, "x" * 1000 + "…")) < 1100
    assert len(check(client.post(COMPLETIONS, raw(model=name)), 404, "model")) < 1100
    check(client.post(COMPLETIONS, raw(**{"two\nlines": 1})), 400, "two\nlines", "unknown_field")


@pytest.mark.parametrize(
    "text", [b"1e400", b"-1e400", b"-Infinity", b"9" * 5000, b'"1"', b"[1]", b"true", b"0x1", b"01", b"1."]
)
@pytest.mark.parametrize("field", [b"temperature", b"max_tokens", b"seed", b"top_k"])
def test_numbers_that_are_none(client, field, text):
    assert (
        client.post(COMPLETIONS, b'{"model":"fake","prompt":"hi","' + field + b'":' + text + b"}")[0] == 400
    )


@pytest.mark.parametrize("field", [b"user", b"cache_salt", b"stop", b"model", b"x"])
def test_half_a_surrogate_pair_anywhere_is_no_text(client, field):
    body = b'{"model":"fake","prompt":"hi","' + field + b'":"\\ud83d"}'
    assert client.post(COMPLETIONS, body)[0] == 400


def test_a_chunked_body_over_the_limit_is_413(client):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as sock:
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(40):
                sock.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        except ConnectionError:  # it was refused before all was sent
            pass
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_too_long_names_both_lengths(client):
    for extra in (0, 1, 9, 9 * LIMIT):
        message = check(
            client.post(COMPLETIONS, {"prompt": [1] * (LIMIT + extra), "max_tokens": 1}),
            400,
            "prompt",
            "context_length_exceeded",
        )
        assert str(LIMIT) in message
        assert str(LIMIT + extra) in message
    message = check(
        client.post(COMPLETIONS, {"prompt": [1] * 150, "max_tokens": 51}),
        400,
        "max_tokens",
        "context_length_exceeded",
    )
    assert all(str(n) in message for n in (LIMIT, 150, 51, 201))
    check(client.post(CHAT, chat(max_tokens=LIMIT)), 400, "max_tokens", "context_length_exceeded")


def test_the_exact_limit_is_served(serve):
    backend = ScriptedBackend("x" * 300, max_tokens=LIMIT)
    with serve(backend) as client:
        assert client.complete([1] * (LIMIT - 1), max_tokens=1)["usage"]["total_tokens"] == LIMIT
        assert client.complete([1] * (LIMIT - 1), max_tokens=None)["usage"]["completion_tokens"] == 1
        assert client.complete([1] * 150, max_tokens=50)["usage"]["completion_tokens"] == 50


def test_unknown_model_is_404(client):
    check(client.post(COMPLETIONS, {"model": "other", "prompt": "hi"}), 404, "model", "model_not_found")
    check(client.post(CHAT, chat(model="other")), 404, "model", "model_not_found")
    assert client.get("/v1/models/other")[0] == 404


def test_wrong_method_path_and_content_type(client):
    status, headers, body = client.request("GET", COMPLETIONS)
    check((status, headers, json.loads(body)), 405, None)
    assert headers["Allow"] == "POST"
    status, headers, body = client.get("/v1/nothing")
    check((status, headers, json.loads(body)), 404, None)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "nonsense"):
        check(client.post(COMPLETIONS, raw(), **{"Content-Type": kind}), 415, None)


def test_a_body_over_the_limit_is_413(client):
    check(client.post(COMPLETIONS, raw(prompt="x" * (1 << 20))), 413, None)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_over_the_limit_is_413(client, encoding):
    for size in (1 << 20, 200 << 20):
        bomb = COMPRESSED[encoding](b'{"model":"fake","prompt":"' + b"x" * size + b'"}')
        assert len(bomb) < 1 << 20
        check(client.post(COMPLETIONS, bomb, **{"Content-Encoding": encoding}), 413, None, "body_too_large")
    members = gzip.compress(b"x" * (1 << 19)) * 3
    check(client.post(COMPLETIONS, members, **{"Content-Encoding": "gzip"}), 413, None, "body_too_large")


def test_a_huge_declared_length_is_refused_without_reading_it(client):
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100000000\r\n\r\n" + b"x" * (2 << 20)
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_not_waited_for(client, monkeypatch):
    monkeypatch.setattr("mooncake_jax.frontend.body.BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"model":'
        )
        received = b""
        while b"}}" not in received and (part := sock.recv(4096)):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    monkeypatch.undo()  # the canary after this is not that fast


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_its_encoding_says(client, encoding):
    good = COMPRESSED[encoding](raw())
    for body in (b"no gzip at all", good[:-4], good + b"rubbish"):
        check(client.post(COMPLETIONS, body, **{"Content-Encoding": encoding}), 400, None, "invalid_body")
    check(client.post(COMPLETIONS, b"", **{"Content-Encoding": encoding}), 400, None, "invalid_json")


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "identity, x", "nonsense"])
def test_an_encoding_that_is_not_decoded_is_named(client, encoding):
    for body in (raw(), gzip.compress(raw())):
        reply = client.post(COMPLETIONS, body, **{"Content-Encoding": encoding})
        assert encoding in check(reply, 415, None, "unsupported_content_encoding")


def test_a_compressed_body_is_read(serve):
    with serve(ScriptedBackend(CANARY)) as client:
        for encoding, body in (
            ("gzip", gzip.compress(raw(max_tokens=9))),
            ("GZip", gzip.compress(raw(max_tokens=9))),
            ("gzip", gzip.compress(raw(max_tokens=9)[:7]) + gzip.compress(raw(max_tokens=9)[7:])),
            ("deflate", zlib.compress(raw(max_tokens=9))),
            ("identity", raw(max_tokens=9)),
        ):
            status, _, reply = client.post(COMPLETIONS, body, **{"Content-Encoding": encoding})
            assert status == 200, reply
            assert reply["choices"][0]["text"] == CANARY


def test_a_body_in_many_pieces_is_refused_before_they_are_all_read(client):
    pieces = gzip.compress(b"") * 10_000
    check(client.post(COMPLETIONS, pieces, **{"Content-Encoding": "gzip"}), 400, None, "invalid_body")

"""What a good request gets: whole and streamed answers agree in text, usage and details."""

import time

import pytest
from fakes.answers import EOS, ScriptedBackend

from kvstore.errors import (
    DeadlineError,
    ExhaustedError,
    InternalError,
    InvalidError,
    RefusedError,
    UnavailableError,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Zwölf Boxkämpfer 🥊 jagen Viktor quer über den großen Sylter Deich"


def streamed_text(events):
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def test_whole_completion(serve):
    with serve(ScriptedBackend(TEXT, step=3)) as client:
        body = client.complete("hello")
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT, "stop", None)
    num_answer = len(TEXT.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": num_answer,
        "total_tokens": 5 + num_answer,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    route = body["mooncake"]
    assert route["ttft_seconds"] >= 0
    del route["ttft_seconds"]
    assert route == {"prefill": "prefill-0", "decode": "decode-0", "cached_tokens": 3, "fetched_tokens": 2}


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize("max_tokens", [1, 3, 7, 100])  # 3 and 7 end within a character
def test_streamed_text_is_the_whole_text(serve, step, max_tokens):
    with serve(ScriptedBackend(TEXT, step=step)) as client:
        whole = client.complete(max_tokens=max_tokens)["choices"][0]
        events = client.stream(max_tokens=max_tokens)
    assert streamed_text(events) == whole["text"]
    assert "�" not in "".join(e["choices"][0]["text"] for e in events[:-1])
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert set(reasons[:-1]) <= {None}
    assert reasons[-1] == whole["finish_reason"] == ("stop" if max_tokens == 100 else "length")


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (TEXT[5:17], TEXT[:5]),
        (["Vik", "Viktor"], TEXT[: TEXT.index("Vik")]),
        (["Viktor q", "tor"], TEXT[: TEXT.index("tor")]),
        ("fer 🥊 j", TEXT[: TEXT.index("fer")]),
        ("🥊", TEXT[: TEXT.index("🥊")]),
        (["Viktor quack", "zzz"], TEXT),
        ("Deich!", TEXT),
        ("Z", ""),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 100])
def test_stop_strings(serve, stop, kept, step):
    backend = ScriptedBackend(TEXT, step=step)
    with serve(backend) as client:
        whole = client.complete(stop=stop)
        events = client.stream(stop=stop, stream_options={"include_usage": True})
    assert whole["choices"][0]["text"] == kept
    assert streamed_text(events) == kept
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"] == whole["usage"]
    if kept != TEXT:
        assert whole["usage"]["completion_tokens"] < len(TEXT.encode())


def test_a_stop_string_ends_the_work_at_the_backend(serve):
    backend = ScriptedBackend("abcdefgh" * 50, max_tokens=5000)
    with serve(backend) as client:
        client.complete(stop="efg", max_tokens=400)
    assert backend.num_sent == 7


def test_usage_only_when_asked_and_last(serve):
    with serve(ScriptedBackend("ab")) as client:
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            assert all("usage" not in event for event in client.stream(**options))
        for path, fields in ((COMPLETIONS, {}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
            *chunks, last = client.stream(path, stream_options={"include_usage": True}, **fields)
            assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
            assert chunks
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 3


def test_chat_whole_and_streamed(serve):
    backend = ScriptedBackend(TEXT, step=2)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}]},
    ]
    with serve(backend) as client:
        status, _, body = client.post("/v1/chat/completions", {"messages": messages, "logprobs": True})
        assert status == 200, body
        events = client.stream("/v1/chat/completions", messages=messages)
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT, "refusal": None}
    content = body["choices"][0]["logprobs"]["content"]
    *said, end = content
    assert bytes(b for item in said for b in item["bytes"]).decode() == TEXT
    assert [item["token"] for item in said[:3]] == ["Z", "w", "bytes:\\xc3"]
    assert end["token"] == "<end>"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert bytes(backend.requests[0].tokens).decode() == "system:Be brief.\nuser:Say it\n"


def test_logprobs_offsets_and_token_ids_agree(serve):
    with serve(ScriptedBackend("aé🥊z", step=3)) as client:
        body = client.complete([104, 105], logprobs=0, return_token_ids=True)
        whole = body["choices"][0]
        chunks = [e["choices"][0] for e in client.stream(logprobs=0, return_token_ids=True)]
    logprobs = whole["logprobs"]
    assert body["prompt_token_ids"] == [104, 105]
    assert whole["token_ids"] == [*"aé🥊z".encode(), EOS]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 9
    assert logprobs["tokens"][:2] == ["a", "bytes:\\xc3"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]  # where the text stands before each token
    assert logprobs["top_logprobs"] is None
    assert [token for c in chunks for token in c["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [item for c in chunks for item in c["logprobs"][name]] == logprobs[name]


def test_what_the_backend_is_asked(serve):
    backend = ScriptedBackend("abc")
    with serve(backend) as client:
        client.complete([5, 6], temperature=0, top_p=0.5, top_k=-1, seed=-1, cache_salt="tenant", user="me")
        client.complete(["hi"], ignore_eos=True, max_tokens=2, mooncake_avoid=["prefill-1"], n=1)
        client.complete([[1]], max_tokens=None)
    first, second, third = backend.requests
    assert first.tokens == [5, 6]
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0, 0.5, 0)
    assert first.sampling.seed == 2**32 - 1
    assert (first.salt, first.stop_token_ids) == ("tenant", [EOS])
    assert (second.stop_token_ids, second.tokens, second.max_tokens) == ([], list(b"hi"), 2)
    assert second.sampling.temperature == 1.0
    assert (third.tokens, third.max_tokens) == ([1], 16)
    assert second.sampling.seed != third.sampling.seed
    assert backend.avoided == [[], ["prefill-1"], []]


def test_chat_default_length_is_what_is_left_up_to_the_limit(serve):
    backend = ScriptedBackend("abc", max_tokens=100)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    prompt = len(b"user:hi\n")
    with serve(backend, chat_max_tokens=60) as client:
        client.post("/v1/chat/completions", chat)
        client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "h" * 70}]})
        client.post("/v1/chat/completions", chat | {"max_tokens": 5, "max_completion_tokens": 7})
    assert [r.max_tokens for r in backend.requests] == [60, 100 - prompt - 68, 7]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RefusedError("TTFT of 9 s is over the SLO", 2.3), 429, "overloaded"),
        (ExhaustedError("no staging"), 429, "no_room"),
        (UnavailableError("no instance"), 503, "unavailable"),
        (DeadlineError("no token within 60 s"), 504, "deadline"),
        (InvalidError("can never fit"), 400, None),
        (InternalError("oops"), 500, "internal"),
        (RuntimeError("a fault of ours"), 500, "internal"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_are_statuses(serve, error, status, code, stream):
    with serve(ScriptedBackend(error=error)) as client:
        got, headers, body = client.post("/v1/completions", {"prompt": "hi", "stream": stream})
        assert (got, body["error"]["code"]) == (status, code)
        assert str(error) in body["error"]["message"]
        if status in (429, 503):
            assert int(headers["Retry-After"]) == (3 if status == 429 and code == "overloaded" else 1)
        assert client.get("/health")[0] == 200


def test_an_error_mid_stream_is_an_error_event_and_no_done(serve):
    backend = ScriptedBackend(TEXT, error=InternalError("decode-0 is gone"), fail_after=4)
    with serve(backend) as client:
        status, _, raw = client.post("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 90})
        assert client.post("/v1/completions", {"prompt": "hi", "max_tokens": 90})[0] == 500
    events = raw.decode().strip().split("\n\n")
    assert status == 200
    assert len(events) > 1
    assert "decode-0 is gone" in events[-1]
    assert '"error"' in events[-1]
    assert "[DONE]" not in raw.decode()


def test_a_backend_that_ends_without_a_reason_is_an_error(serve):
    with serve(ScriptedBackend("", eos=False)) as client:
        status, _, body = client.post("/v1/completions", {"prompt": "hi"})
    assert status == 500
    assert "finish reason" in body["error"]["message"]


def test_too_many_at_once_is_429(serve):
    backend = ScriptedBackend(TEXT, hang_after=2)
    with serve(backend, max_concurrent=1) as client:
        import http.client as h

        held = h.HTTPConnection("127.0.0.1", client.port, timeout=20)
        held.request(
            "POST", "/v1/completions", b'{"model":"fake","prompt":"a"}', {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 10
        while not backend.num_open and time.monotonic() < deadline:
            time.sleep(0.005)
        status, headers, body = client.post("/v1/completions", {"prompt": "hi"})
        held.close()
    assert (status, body["error"]["code"]) == (429, "overloaded")
    assert "Retry-After" in headers


def test_ready_and_metrics(serve):
    backend = ScriptedBackend("abc")
    with serve(backend) as client:
        client.complete()
        assert client.get("/ready")[0] == 200
        metrics = client.get("/metrics")[2].decode()
        backend.max_tokens = None
        assert client.get("/ready")[0] == 503
        assert client.post("/v1/completions", {"prompt": "hi"})[0] == 503
    assert 'mooncake_requests_total{endpoint="/v1/completions",status="200"} 1.0' in metrics
    assert "mooncake_ttft_seconds_count 1.0" in metrics
    assert "mooncake_tbt_seconds_count 3.0" in metrics
    assert "mooncake_prefill_queue_seconds_sum 0.25" in metrics
    assert "mooncake_cached_tokens_total 3.0" in metrics
    assert "mooncake_requests_in_flight 0.0" in metrics

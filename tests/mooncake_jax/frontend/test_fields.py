"""Fields of the two generating endpoints: what each does to the request and to its answer."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.answers import EOS, ByteDetokenizer, ByteTokenizer, ScriptedBackend

from kvstore.errors import ExhaustedError
from mooncake_jax.request import Bias

TEXT = "aé🥊z"


def choice_texts(events, num_choices):
    texts = [""] * num_choices
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def test_sampling_fields_reach_the_backend(serve):
    backend = ScriptedBackend("abc")
    with serve(backend) as client:
        client.complete(
            min_p=0.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            logit_bias={"5": 2, "97": -100},
            min_tokens=3,
            logprobs=4,
        )
        client.complete(ignore_eos=True, min_tokens=3, max_tokens=3)
    sampling, plain = (request.sampling for request in backend.requests)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.5, 1.5)
    assert (sampling.repetition_penalty, sampling.num_top) == (1.25, 4)
    assert sampling.biases == [Bias(5, 2.0), Bias(97, -100.0), Bias(EOS, -1e30, 3)]
    assert plain.biases == []
    assert not plain.looks_back
    assert sampling.looks_back


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_to_each_prompt(serve, stream):
    backend = ScriptedBackend(TEXT, step=2)
    fields = {"prompt": ["hi", [5, 6, 7]], "n": 3, "seed": 2**32 - 1, "return_token_ids": True}
    with serve(backend) as client:
        if stream:
            *events, last = client.stream(**fields, stream_options={"include_usage": True})
            assert choice_texts(events, 6) == [TEXT] * 6
            ends = [c["index"] for e in events for c in e["choices"] if c["finish_reason"] == "stop"]
            assert sorted(ends) == list(range(6))
            assert last["choices"] == []
            usage = last["usage"]
        else:
            body = client.complete(**fields)
            usage = body["usage"]
            assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
                (i, TEXT, "stop") for i in range(6)
            ]
            assert [c["prompt_token_ids"] for c in body["choices"]] == [list(b"hi")] * 3 + [[5, 6, 7]] * 3
    num_answer = len(TEXT.encode()) + 1
    assert usage["prompt_tokens"] == 5
    assert usage["completion_tokens"] == 6 * num_answer
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6  # of the first answer to each prompt
    seeds = sorted((bytes(r.tokens), r.sampling.seed) for r in backend.requests)
    assert seeds == [(p, s) for p in (bytes([5, 6, 7]), b"hi") for s in (0, 1, 2**32 - 1)]
    assert len({r.request_id for r in backend.requests}) == 6


def test_further_answers_wait_for_the_first_token_of_the_first(serve):
    backend = ScriptedBackend("abcdef", hang_after=0)
    with serve(backend) as client:
        with pytest.raises(TimeoutError):
            client.post_for(0.3, "/v1/completions", {"prompt": ["x", "y"], "n": 4})
        assert len(backend.requests) == 2, "one of each prompt is enough to see whether it starts"


def test_one_answer_that_fails_fails_the_request_and_ends_the_others(serve):
    backend = ScriptedBackend("x" * 50, error=ExhaustedError("no room"), fail_after=4)
    with serve(backend) as client:
        status, _, body = client.post("/v1/completions", {"prompt": "hi", "n": 3, "max_tokens": 60})
        assert (status, body["error"]["code"]) == (429, "no_room")
    assert backend.num_closed == len(backend.requests) > 1


def test_more_answers_than_the_server_gives_at_once_are_refused(serve):
    with serve(ScriptedBackend("ab"), max_concurrent=3) as client:
        status, _, body = client.post("/v1/completions", {"prompt": "hi", "n": 4})
        assert (status, body["error"]["param"]) == (400, "n")
        assert len(client.complete(n=3)["choices"]) == 3


ECHOES = list(itertools.product([False, True], [0, 1, None], [None, 0, 1, 5]))


@pytest.mark.parametrize(("echo", "max_tokens", "logprobs"), ECHOES)
@pytest.mark.parametrize("prompt", ["a🥊", list("a🥊".encode())], ids=["text", "ids"])
def test_echo_with_and_without_an_answer(serve, echo, max_tokens, logprobs, prompt):
    """vllm-project/vllm#6521, #9336, #2706, EleutherAI/lm-evaluation-harness#1411."""
    backend = ScriptedBackend("yes", step=2)
    fields = {"prompt": prompt, "echo": echo, "max_tokens": max_tokens, "logprobs": logprobs}
    with serve(backend) as client:
        body = client.complete(**fields)
        events = client.stream(**fields)
    choice = body["choices"][0]
    answer = {0: "", 1: "y", None: "yes"}[max_tokens]
    num_answer = {0: 0, 1: 1, None: 4}[max_tokens]
    num_prompt = 5
    assert choice["text"] == ("a🥊" if echo else "") + answer
    assert choice_texts(events, 1) == [choice["text"]]
    assert choice["finish_reason"] == ("stop" if max_tokens is None else "length")
    assert body["usage"]["completion_tokens"] == num_answer
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert len(backend.requests) == (0 if max_tokens == 0 and not (echo and logprobs is not None) else 2)
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    told = choice["logprobs"]
    length = num_prompt * echo + num_answer
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [length] * 3
    assert told["token_logprobs"] == [None, *[-1.5] * 4][: num_prompt * echo] + [-0.5] * num_answer
    assert told["text_offset"] == [0, 1, 1, 1, 1][: num_prompt * echo] + [
        2 * echo + i for i in range(num_answer)
    ]
    if logprobs:
        assert len(told["top_logprobs"]) == length
        assert [top is None for top in told["top_logprobs"]] == [p is None for p in told["token_logprobs"]]
        for name, top in zip(told["tokens"], told["top_logprobs"], strict=True):
            assert top is None or (name in top and logprobs <= len(top) <= logprobs + 1)
    else:
        assert told["top_logprobs"] is None
    joined = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [item for part in joined for item in part[name]] == told[name]


def test_every_echo_of_one_prompt_has_its_log_probabilities(serve):
    backend = ScriptedBackend("yes")
    with serve(backend) as client:
        body = client.complete("abc", echo=True, logprobs=2, n=3, max_tokens=2)
        only = client.complete("abc", echo=True, logprobs=2, n=3, max_tokens=0)
    for choice in body["choices"] + only["choices"]:
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -1.5, -1.5]
        assert choice["logprobs"]["top_logprobs"][1] == {"a": -2.0, "b": -1.5}
    assert [request.score_prompt for request in backend.requests] == [True, False, False, True]


class SlowNames(ByteTokenizer):
    """Names no token, and so lets no log probabilities be written, until `others_went_on`."""

    def __init__(self):
        self.writing, self.others_went_on = threading.Event(), threading.Event()

    def token_bytes(self, token_id):
        self.writing.set()
        assert self.others_went_on.wait(20), "nothing else could be served meanwhile"
        return super().token_bytes(token_id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"echo": True, "max_tokens": 0}, {"max_tokens": 200}], ids=str)
def test_other_requests_go_on_while_many_log_probabilities_are_written(serve, stream, fields):
    tokenizer, backend = SlowNames(), ScriptedBackend("x" * 200, step=200)
    fields = fields | {"prompt": "y" * 200, "logprobs": 2, "stream": stream}
    with serve(backend, tokenizer) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/v1/completions", fields)
        assert tokenizer.writing.wait(20)
        assert choice_texts(client.stream(max_tokens=5), 1) == ["x" * 5]
        tokenizer.others_went_on.set()
        status, _, reply = asked.result()
        assert status == 200
        if stream:
            events = [json.loads(e.removeprefix("data: ")) for e in reply.decode().split("\n\n")[:-2]]
            told = [p for e in events for p in e["choices"][0]["logprobs"]["token_logprobs"]]
        else:
            told = reply["choices"][0]["logprobs"]["token_logprobs"]
        assert told == ([None, *[-1.5] * 199] if "echo" in fields else [-0.5] * 200)


class SlowPieces(ByteTokenizer):
    """Reads no `y` until `others_went_on`."""

    def __init__(self):
        self.reading, self.others_went_on = threading.Event(), threading.Event()

    def detokenizer(self, *, continues=False):
        return SlowDetokenizer(self)


class SlowDetokenizer(ByteDetokenizer):
    def __init__(self, tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def push(self, token_ids):
        if ord("y") in token_ids:
            self._tokenizer.reading.set()
            assert self._tokenizer.others_went_on.wait(20), "nothing else could be served meanwhile"
        return super().push(token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_other_requests_go_on_while_a_long_prompt_is_echoed(serve, stream, logprobs):
    tokenizer, backend = SlowPieces(), ScriptedBackend("x" * 5)
    fields = {"prompt": "y" * 300, "echo": True, "logprobs": logprobs, "max_tokens": 2, "stream": stream}
    with serve(backend, tokenizer) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/v1/completions", fields)
        assert tokenizer.reading.wait(20)
        assert choice_texts(client.stream(max_tokens=5), 1) == ["x" * 5]
        tokenizer.others_went_on.set()
        status, _, reply = asked.result()
        assert status == 200
        if not stream:
            assert reply["choices"][0]["text"] == "y" * 300 + "xx"


def test_chat_tells_the_most_likely_tokens(serve):
    with serve(ScriptedBackend("é!", eos=False)) as client:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        status, _, body = client.post("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2})
        assert status == 200, body
        content = body["choices"][0]["logprobs"]["content"]
        assert content[0] == {
            "token": "bytes:\\xc3",
            "bytes": [0xC3],
            "logprob": -0.5,
            "top_logprobs": [
                {"token": "a", "bytes": [97], "logprob": -1.0},
                {"token": "b", "bytes": [98], "logprob": -2.0},
            ],
        }
        assert len(content) == 3
        status, _, body = client.post("/v1/chat/completions", chat | {"top_logprobs": 2})
        assert (status, body["error"]["param"]) == (400, "top_logprobs")


def test_stop_strings_count_from_min_tokens_on(serve):
    with serve(ScriptedBackend("abcabcabc")) as client:
        for min_tokens, text in ((0, "a"), (1, "a"), (2, "abca"), (3, "abca"), (4, "abca"), (5, "abcabca")):
            choice = client.complete(stop="bc", min_tokens=min_tokens)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_tokenize_and_detokenize_are_what_the_other_endpoints_see(serve):
    backend = ScriptedBackend("x")
    messages = [{"role": "user", "content": "hi"}]
    with serve(backend) as client:
        _, _, body = client.post("/tokenize", {"prompt": TEXT})
        assert body == {"tokens": list(TEXT.encode()), "count": 8, "max_model_len": 1000}
        _, _, chat = client.post("/tokenize", {"messages": messages})
        client.post("/v1/chat/completions", {"messages": messages})
        assert backend.requests[0].tokens == chat["tokens"]
        assert client.post("/detokenize", {"tokens": body["tokens"]})[2] == {"prompt": TEXT}
        assert client.post("/detokenize", {"tokens": body["tokens"][:2]})[2] == {"prompt": "a�"}
        for path, fields, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
            ("/tokenize", {"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [257]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
        ):
            status, _, body = client.post(path, fields)
            assert (status, body["error"]["param"]) == (400, param), fields
        assert client.post("/tokenize", {"model": "other", "prompt": "a"})[0] == 404

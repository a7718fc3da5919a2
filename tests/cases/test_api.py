"""The HTTP API over the whole system: what is wrong is a 4xx that says so, what is right is the oracle's answer.

Reported in public as
- vllm-project/vllm#7283, #7632: an empty prompt kills the engine where the tokenizer adds no BOS;
- vllm-project/vllm#3574, mzau/mlx-knife#68: stop strings of several tokens leak into a stream, or are missed;
- ggml-org/llama.cpp#7089, #6396, mozilla-ai/llamafile#116: broken requests abort the server;
- sgl-project/sglang#30233, #33507, JustVugg/colibri#506, ollama/ollama#2208: a prompt that is too long is cut
  silently, or answered from incomplete KV.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from cases.judge import MAX_TOKENS, refused, text
from cases.served import CHAT, COMPLETIONS, LETTERS, bos_tokenizer
from e2e.real import CFG, Z

from launch.model_source import byte_tokenizer
from models.tokenizer import Tokenizer, TokenizerSettings, byte_level_bpe
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.request import Request, Sampling
from mooncake_jax.staging_layout import StagingLayout

LIMIT = CFG.max_position

# vllm-project/vllm#7283, #7632


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, bos_tokenizer])
def test_an_empty_prompt_is_refused_and_an_empty_message_is_not_empty(tokenizer, serve):
    served = serve(tokenizer())
    for prompt in ("", [""], [], [[]], None):
        refused(served.post(COMPLETIONS, {"prompt": prompt}), 400)
    refused(served.post(CHAT, {"messages": []}), 400)
    for content in ("", [{"type": "text", "text": ""}]):
        message = {"messages": [{"role": "user", "content": content}]}
        reply = served.post(CHAT, message | {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True})
        status, body = reply
        assert status == 200, body
        assert len(body["prompt_token_ids"]) >= 1
        tokens = body["choices"][0]["token_ids"]
        assert served.judge.oracle.score(body["prompt_token_ids"], tokens).best.tolist() == tokens


def test_an_empty_message_of_a_template_that_adds_nothing_is_refused(serve):
    backend = byte_level_bpe(LETTERS, [], pre_tokenizer="gpt-2")
    bare = TokenizerSettings(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    served = serve(Tokenizer(backend, bare))
    assert "empty" in refused(served.post(CHAT, {"messages": [{"role": "user", "content": ""}]}), 400)


# vllm-project/vllm#3574, mzau/mlx-knife#68

PROSE = "Ærøskøbing, 東京 & Zürich: naïve café 😀 für 5 € – ¿qué?"
PIECES = 24


class Told(NamedTuple):
    """A request, and the text that answers it."""

    prompt: list[int]
    fields: dict
    tokens: list[int]
    text: str


def greedy_text(oracle) -> tuple[Tokenizer, Told]:
    """What the model says of itself, in bytes that are mostly no characters."""
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("Die naïve Übersetzung von 東京 lautet ")
    tokens = oracle.generate(Request("greedy", prompt, 40)).tokens
    return tokenizer, Told(prompt, {"temperature": 0}, tokens, tokenizer.decode(tokens))


def prose(oracle) -> tuple[Tokenizer, Told]:
    """Real prose: the vocabulary gives its pieces, cut anywhere in its bytes, to the tokens that are drawn."""
    prompt = text(33, seed=24)
    for seed in range(1000):
        sampling, tokens = Sampling(temperature=2.0, seed=seed), []
        oracle.generate(
            Request("sampled", prompt, PIECES, sampling),
            on_token=lambda token, _p, _top, drawn=tokens: drawn.append(token),
            cancelled=lambda drawn=tokens: len(set(drawn)) < len(drawn),
        )
        if len(set(tokens)) == PIECES:
            break
    else:
        pytest.fail("choose another prompt: no seed draws only different tokens")
    raw = PROSE.encode()
    cuts = [len(raw) * i // PIECES for i in range(PIECES + 1)]
    letter_of = {_byte(letter): letter for letter in LETTERS}
    vocabulary = [f"filler-{i}" for i in range(CFG.vocab_size)]
    seen: dict[str, int] = {}
    for token, start, stop in zip(tokens, cuts, cuts[1:], strict=False):
        piece = "".join(letter_of[byte] for byte in raw[start:stop])
        assert seen.setdefault(piece, token) == token, "choose another prose: this piece comes twice"
        vocabulary[token] = piece
    tokenizer = Tokenizer(byte_level_bpe(vocabulary, [], pre_tokenizer="gpt-2"), TokenizerSettings())
    return tokenizer, Told(prompt, {"temperature": 2, "seed": seed}, tokens, PROSE)


def _byte(letter: str) -> int:
    return byte_tokenizer().token_bytes(LETTERS.index(letter))[0]


@pytest.mark.parametrize("tell", [greedy_text, prose])
def test_stop_strings_cut_the_same_streamed_and_whole(tell, serve, oracle):
    tokenizer, told = tell(oracle)
    served, whole = serve(tokenizer), told.text
    assert len(whole) >= 20
    assert tokenizer.decode(told.tokens) == whole
    middle = whole[5:17]
    stops = [
        [],
        [middle],
        [middle[:3], middle],  # one is the beginning of the other
        [middle, middle[:3]],
        [whole[11]],
        [whole[6:9], whole[7:10]],  # they overlap
        [middle[:-1] + "\x00"],  # nearly, and then not
        [whole[-3:] + "\x00"],  # held back until the end
        [whole[-2:]],
        [whole[0]],
        *([character] for character in dict.fromkeys(whole) if len(character.encode()) > 1),
    ]
    for stop in stops:
        expected = _cut(whole, stop)
        fields = told.fields | {"stop": stop, "logprobs": 0}
        status, body = served.frontend.ask(told.prompt, len(told.tokens), **fields)
        assert status == 200, body
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == expected, stop
        assert choice["token_ids"] == told.tokens[: len(choice["token_ids"])]
        greedy = told.fields["temperature"] == 0
        logprobs = choice["logprobs"]["token_logprobs"]
        assert served.judge.violation(told.prompt, choice["token_ids"], logprobs, greedy=greedy) is None
        events = [
            event["choices"][0] for event in served.frontend.stream(told.prompt, len(told.tokens), **fields)
        ]
        assert "".join(event["text"] for event in events) == expected[0], stop
        assert [event["finish_reason"] for event in events if event["finish_reason"]] == [expected[1]]
        assert [token for event in events for token in event["token_ids"]] == choice["token_ids"]
    served.cluster.check_idle()  # what a stop ended has ended at decode, too


def _cut(whole: str, stops: list[str]) -> tuple[str, str]:
    """By the definition: before the longest of the stops that are complete first."""
    for end in range(1, len(whole) + 1):
        if complete := [stop for stop in stops if whole[:end].endswith(stop)]:
            return whole[: end - max(map(len, complete))], "stop"
    return whole, "length"


# ggml-org/llama.cpp#7089, #6396, mozilla-ai/llamafile#116

BROKEN = [
    b"",
    b"{:",
    b"\x00\xff",
    '{"model":"fake","prompt":"你好"}'.encode("gbk"),
    b'{"model":"fake","prompt":"\\ud83d"}',
    b'{"model":"fake","prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    {"prompt": "hi", "n": 0},
    {"prompt": "hi", "n": -1},
    {"prompt": "hi", "temperature": "hot"},
    b'{"model":"fake","prompt":"hi","temperature":NaN}',
    {"prompt": "hi", "temperature": -1},
    {"prompt": "hi", "top_p": 0},
    {"prompt": "hi", "no_such_field": 1},
    {"prompt": [CFG.vocab_size]},
    {"prompt": [2**31]},
    {"prompt": 7},
    {"prompt": "hi", "max_tokens": -1},
]


def test_broken_requests_beside_good_ones(serve):
    """They break nothing: not themselves into a 5xx, not the answers that are under way meanwhile."""
    served = serve()
    asking = threading.Event()
    asking.set()

    def ask_until_told(seed: int) -> int:
        count = 0
        while asking.is_set() or count == 0:
            tokens = text(40 + 30 * count, seed)
            served.judge.right_reply(tokens, served.frontend.ask(tokens, MAX_TOKENS, logprobs=0))
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:  # one: the oracle answers one at a time
        good = pool.submit(ask_until_told, 28)
        try:
            for body in BROKEN:
                refused(served.post(COMPLETIONS, body), 400)
                refused(served.post(CHAT, body), 400)
            refused(served.post(COMPLETIONS, {"model": "another", "prompt": "hi"}), 404)
            refused(served.post(COMPLETIONS, {"prompt": "hi"}, **{"Content-Type": "text/plain"}), 415)
            refused(served.post(COMPLETIONS, {"prompt": "x" * 100_000_000}), 413)
            status, reply = served.frontend.request("GET", COMPLETIONS)
            refused((status, json.loads(reply)), 405)
        finally:
            asking.clear()
        assert good.result() >= 1


# sgl-project/sglang#30233, #33507, JustVugg/colibri#506, ollama/ollama#2208


def test_a_prompt_too_long_is_refused_with_both_lengths_and_the_exact_limit_is_served(serve):
    served = serve()
    for length, max_tokens in [
        (LIMIT - 1, 1),
        (LIMIT - 1, None),
        (LIMIT - MAX_TOKENS, MAX_TOKENS),
        (LIMIT - 2, 2),
    ]:
        tokens = text(length, seed=29)
        reply = served.frontend.ask(tokens, max_tokens, logprobs=0)
        served.judge.right_reply(tokens, reply, max_tokens or 1)
        assert reply[1]["choices"][0]["finish_reason"] == "length"
        assert reply[1]["usage"]["prompt_tokens"] == length
    before = {name: served.cluster.counters(name) for name in served.cluster.instances}
    over = [
        (LIMIT - 1, 2),
        (LIMIT - 1, 500),
        (LIMIT, 1),
        (LIMIT, 500),
        (LIMIT + 1, 1),
        (LIMIT + 9, 1),
        (10 * LIMIT, 1),
    ]
    for length, max_tokens in over:
        tokens = [i % CFG.vocab_size for i in range(length)]
        for stream in (False, True):
            message = refused(served.frontend.ask(tokens, max_tokens, stream=stream), 400)
            assert str(LIMIT) in message
            assert str(length) in message
    served.cluster.check_idle()
    moved = ("tcp_write", "shm_write")
    for name, counters in before.items():  # nothing of them was computed or moved
        now = served.cluster.counters(name)
        assert [now[path] for path in moved] == [counters[path] for path in moved]


def test_a_prompt_that_never_fits_into_staging_memory_is_refused_not_queued(serve, engines):
    form = engines[1][0].format
    room = DecodeConfig(staging_nbytes=StagingLayout(form, 20).nbytes, quarantine_seconds=0.1)
    served = serve(decode_config=room)
    fits, too_long = text(20 * Z, seed=30), text(20 * Z + 1, seed=30)
    began = time.monotonic()
    for stream in (False, True):
        message = refused(served.frontend.ask(too_long, MAX_TOKENS, stream=stream), 400)
        assert "staging memory" in message
        assert str(len(too_long)) in message
    assert time.monotonic() - began < 20, "it waited for room that there never is"
    served.cluster.check_idle()
    served.judge.right_reply(fits, served.frontend.ask(fits, MAX_TOKENS, logprobs=0))
    served.judge.right_reply(too_long, served.frontend.ask(too_long, 1, logprobs=0), 1)  # needs no decode
    with ThreadPoolExecutor(4) as pool:  # one at a time fits: the others wait, and are answered
        prompts = [text(20 * Z - i, seed=31 + i) for i in range(4)]
        replies = list(pool.map(lambda tokens: served.frontend.ask(tokens, MAX_TOKENS, logprobs=0), prompts))
    for tokens, reply in zip(prompts, replies, strict=True):
        served.judge.right_reply(tokens, reply)

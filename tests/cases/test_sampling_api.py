"""How tokens are drawn, over the whole system: whoever else is served, an answer is the oracle's.

Reported in public as
- vllm-project/vllm#6521, #9336, #2706, EleutherAI/lm-evaluation-harness#1411: echo without an answer fails;
  vllm-project/vllm#3251, #42245: prompt log probabilities are stale or missing where the prompt is cached;
- sgl-project/sglang#12151, NVIDIA/TensorRT-LLM#16691, ai-dynamo/dynamo#13442: prefill's token ends the answer, and
  decode goes on;
- ggml-org/llama.cpp#15443, ROCm/ATOM#1711, vllm-project/router#193: `cached_tokens` is decode's view;
- vllm-project/vllm#51226, tenstorrent/tt-metal#53802: a seed depends on who shares the batch;
- vllm-project/vllm#4180, #4182, #4589: only one of several end tokens ends an answer;
- vllm-project/vllm#27515, #5278, sgl-project/sglang#888: BOS twice, or never.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases.judge import text
from cases.served import CHAT, COMPLETIONS, LETTERS, bos_tokenizer
from e2e.real import CFG, Z

from models.draw import FORBIDDEN
from models.tokenizer import Tokenizer, TokenizerSettings, byte_level_bpe
from mooncake_jax.frontend.text import token_name
from mooncake_jax.request import Bias, Request, Sampling


def ending_tokenizer(*eos_ids: int) -> Tokenizer:
    """A piece for every id, so that any of them may be named an end token."""
    pieces = LETTERS + [f"{i}," for i in range(len(LETTERS), CFG.vocab_size)]
    return Tokenizer(byte_level_bpe(pieces, [], pre_tokenizer="gpt-2"), TokenizerSettings(eos_ids=eos_ids))


def choice_of(reply) -> dict:
    status, body = reply
    assert status == 200, body
    return body["choices"][0]


# echo and prompt log probabilities


def test_echo_tells_the_oracles_log_probabilities_cached_or_not(serve):
    served = serve()
    prompt = text(9 * Z + 5, seed=22)
    scores = served.judge.oracle.score(prompt[:1], prompt[1:])
    for logprobs in (0, 1, 5):
        for max_tokens in (0, 1, None):
            fields = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
            replies = [served.post(COMPLETIONS, fields | {"return_token_ids": True}) for _ in range(2)]
            for reply in replies:
                told, tokens = choice_of(reply)["logprobs"], choice_of(reply)["token_ids"]
                num_answer = {0: 0, 1: 1, None: 16}[max_tokens]
                assert tokens[: len(prompt)] == prompt
                assert len(tokens) == len(told["token_logprobs"]) == len(prompt) + num_answer
                assert reply[1]["usage"]["completion_tokens"] == num_answer
                assert told["token_logprobs"][0] is None
                got = np.array(told["token_logprobs"][1 : len(prompt)])
                np.testing.assert_allclose(got, scores.logprobs, atol=1e-3)
                if num_answer:
                    answer, logprobs_of = tokens[len(prompt) :], told["token_logprobs"][len(prompt) :]
                    assert served.judge.violation(prompt, answer, logprobs_of) is None
                if logprobs:
                    for top, best in zip(told["top_logprobs"][1:], scores.best, strict=False):
                        assert logprobs <= len(top) <= logprobs + 1
                        likeliest = max(top, key=lambda name: top[name])
                        assert likeliest == name_of(served, int(best))
    hit = served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    assert hit[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "scored prompts are kept, too"


def name_of(served, token):
    return token_name(token, served.tokenizer.token_bytes(token))


# the first token ends it


def test_what_the_first_token_ends_is_over(serve, oracle):
    for seed in range(23, 100):
        prompt = text(3 * Z + 2, seed=seed)
        free = oracle.generate(Request("free", prompt, 8)).tokens
        if free[0] not in free[1:]:
            break
    served = serve(ending_tokenizer(free[0]))
    piece = served.tokenizer.decode([free[0]])
    assert piece

    def ask(**fields):
        status, body = served.post(COMPLETIONS, {"prompt": prompt, "return_token_ids": True} | fields)
        assert status == 200, body
        served.cluster.check_idle()
        choice, usage = body["choices"][0], body["usage"]
        return choice["text"], choice["finish_reason"], choice["token_ids"], usage["completion_tokens"]

    assert ask(max_tokens=8) == ("", "stop", free[:1], 1)
    assert ask(max_tokens=1) == ("", "stop", free[:1], 1)
    assert ask(max_tokens=1, ignore_eos=True) == (piece, "length", free[:1], 1)
    assert ask(max_tokens=8, ignore_eos=True, stop=piece) == ("", "stop", free[:1], 1)
    whole = served.tokenizer.decode(free)
    assert ask(max_tokens=8, ignore_eos=True) == (whole, "length", free, 8)
    for min_tokens in (1, 2, 8):
        biases = [Bias(free[0], FORBIDDEN, min_tokens)]
        how = Request("min", prompt, 8, Sampling(biases=biases), stop_token_ids=free[:1])
        expected = oracle.generate(how)
        got = ask(max_tokens=8, min_tokens=min_tokens)
        assert (got[2], got[1]) == (expected.tokens, expected.finish)
        assert free[0] not in got[2][:min_tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_every_one_of_several_end_tokens_ends_an_answer(serve, stream):
    served = serve(ending_tokenizer(300, 7, 411))
    prompt = text(20, seed=33)
    for end in (300, 7, 411):
        bias = {"logit_bias": {str(end): 100}}
        if stream:
            events = served.frontend.stream(prompt, 5, ignore_eos=False, **bias)
            choices = [event["choices"][0] for event in events]
            assert "".join(choice["text"] for choice in choices) == ""
            assert choices[-1]["finish_reason"] == "stop"
            continue
        body = choice_of(served.frontend.ask(prompt, 5, ignore_eos=False, **bias))
        assert (body["text"], body["finish_reason"], body["token_ids"]) == ("", "stop", [end])
        passed = choice_of(served.frontend.ask(prompt, 5, ignore_eos=True, **bias))
        assert (passed["finish_reason"], passed["token_ids"]) == ("length", [end] * 5)


# usage


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_cached_tokens_are_what_prefill_reused(serve, path, n):
    served = serve()
    words = f"{path} {n} " + "never seen before " * 8
    said = {"prompt": words} if path == COMPLETIONS else {"messages": [{"role": "user", "content": words}]}
    told = []
    for _ in range(2):
        status, body = served.post(path, said | {"n": n, "max_tokens": 3, "ignore_eos": True})
        assert status == 200, body
        told.append(body["usage"])
        assert body["usage"]["completion_tokens"] == 3 * n
        served.cluster.check_idle()
    num_prompt = told[0]["prompt_tokens"]
    assert told[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert told[1]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // Z * Z


# seeds

HOWS = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.02, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": {"5": 3, "6": -100}},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
]


def oracles(oracle, prompt, seed, max_tokens, fields):
    plain = {name: value for name, value in fields.items() if name != "logit_bias"}
    biases = [Bias(int(token), amount) for token, amount in fields.get("logit_bias", {}).items()]
    how = Sampling(seed=seed, biases=biases, **plain)
    return oracle.generate(Request("seeded", prompt, max_tokens, how)).tokens


def test_a_seeded_answer_is_the_oracles_alone_and_in_any_company(serve, oracle):
    served = serve()
    prompt, length = text(2 * Z + 3, seed=27), 12
    expected = [oracles(oracle, prompt, 42, length, how) for how in HOWS]
    greedy = oracle.generate(Request("greedy", prompt, length)).tokens
    assert len({tuple(tokens) for tokens in [*expected, greedy]}) == len(HOWS) + 1

    def ask(how, seed=42):
        fields = how | ({} if seed is None else {"seed": seed})
        while (answer := served.frontend.ask(prompt, length, **fields))[
            0
        ] == 429:  # more than there are slots
            time.sleep(0.05)
        return choice_of(answer)["token_ids"]

    assert [ask(how) for how in HOWS] == expected
    with ThreadPoolExecutor(12) as pool:
        company = [pool.submit(ask, HOWS[i % 3], None if i % 2 else i) for i in range(6)]
        crowd = [pool.submit(ask, how) for how in HOWS * 2]
        assert [one.result() for one in crowd] == expected * 2
        unseeded = [one.result() for one in company[1::2]]
        assert len({tuple(tokens) for tokens in unseeded}) == len(unseeded)
    assert ask({"temperature": 0.0}, seed=1) == greedy


def test_the_answers_of_one_request_are_those_of_the_seeds_that_follow(serve, oracle):
    served = serve()
    prompts = [text(Z + 3, seed=1), text(2 * Z, seed=2)]
    status, body = served.post(
        COMPLETIONS,
        {"prompt": prompts, "n": 2, "seed": 7, "temperature": 1, "max_tokens": 6, "return_token_ids": True},
    )
    assert status == 200, body
    expected = [oracles(oracle, p, seed, 6, {"temperature": 1.0}) for p in prompts for seed in (7, 8)]
    assert [choice["token_ids"] for choice in body["choices"]] == expected


# most likely tokens


def test_the_most_likely_tokens_are_told_from_prefill_and_from_decode(serve):
    served = serve(ending_tokenizer())
    prompt = text(40, seed=5)
    body = choice_of(served.frontend.ask(prompt, 5, logprobs=3, temperature=2, seed=3))
    tokens, told = body["token_ids"], body["logprobs"]
    best = served.judge.oracle.score(prompt, tokens).best
    for i, top in enumerate(told["top_logprobs"]):
        assert 3 <= len(top) <= 4
        assert told["tokens"][i] == name_of(served, tokens[i])
        assert top[told["tokens"][i]] == told["token_logprobs"][i]
        assert max(top, key=lambda name: top[name]) == name_of(served, int(best[i]))
        assert sum(np.exp(list(top.values()))) <= 1 + 1e-4


# BOS


def test_bos_comes_once_for_text_and_never_for_ids(serve):
    served = serve(bos_tokenizer())
    bos = len(LETTERS)

    def prompt_of(path, **said):
        status, body = served.post(path, said | {"max_tokens": 1, "return_token_ids": True})
        assert status == 200, body
        return body["prompt_token_ids"]

    by_text = prompt_of(COMPLETIONS, prompt="same text")
    by_chat = prompt_of(CHAT, messages=[{"role": "user", "content": "same text"}])
    assert by_text == by_chat
    assert by_text.count(bos) == 1 == by_text.index(bos) + 1
    assert prompt_of(COMPLETIONS, prompt=by_text[1:]) == by_text[1:]
    assert prompt_of(COMPLETIONS, prompt=[bos, *by_text]) == [bos, *by_text]
    for fields, tokens in (({}, by_text), ({"add_special_tokens": False}, by_text[1:])):
        raw = json.dumps({"prompt": "same text"} | fields).encode()
        status, body = served.post("/tokenize", raw)
        assert (status, body["tokens"]) == (200, tokens)

"""What real tokenizers make of requests: BOS exactly once, a chat without a template refused.

vllm-project/vllm PR#27515, PR#5278; sgl-project/sglang PR#888: BOS twice or never.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
from fakes.answers import ScriptedBackend
from golden.values import SENTENCEPIECE, TINY_LLAMA

from models.tokenizer import (
    Tokenizer,
    TokenizerSettings,
    read_backend,
    read_sentencepiece,
    sentencepiece_bpe,
)

TURNS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "The work of 😀"}], "max_tokens": 2}


def byte_level() -> tuple:
    return read_backend(TINY_LLAMA / "tokenizer.json"), TokenizerSettings(bos_id=0, eos_ids=(1, 2))


def sentencepiece() -> tuple:
    pieces = read_sentencepiece(SENTENCEPIECE / "tokenizer.model").pieces
    return sentencepiece_bpe(pieces, prefix="every"), TokenizerSettings(bos_id=1, eos_ids=(2,))


@pytest.fixture(params=[byte_level, sentencepiece])
def family(request):
    return request.param


def tokens_of(client, path: str, body: dict) -> list[int]:
    """The prompt as it reached the backend."""
    status, _, reply = client.post(path, {"max_tokens": 2} | body)
    assert status == 200, reply
    tokens = list(client.backend.requests[-1].tokens)
    assert reply["usage"]["prompt_tokens"] == len(tokens)
    return tokens


@pytest.fixture
def asking(serve, family):
    """`asking(add_bos, template)`: a client of a frontend with this tokenizer, and the tokenizer."""
    with ExitStack() as stack:

        def start(add_bos: bool, template: str | None):
            backend, settings = family()
            tokenizer = Tokenizer(backend, replace(settings, add_bos=add_bos, chat_template=template))
            client = stack.enter_context(serve(scripted := ScriptedBackend("ok", eos=False), tokenizer))
            client.backend = scripted
            return client, tokenizer

        yield start


@pytest.mark.parametrize("template", [TURNS, "{{ bos_token }}" + TURNS])
@pytest.mark.parametrize("content", ["The work of 😀", "spelled </s><|end|> out"])
def test_a_chat_has_one_bos_as_has_its_text_in_a_completion(asking, template, content):
    client, tokenizer = asking(True, template)
    messages = [{"role": "user", "content": content}]
    chat = tokens_of(client, "/v1/chat/completions", {"messages": messages})
    assert chat[0] == tokenizer.bos_id
    assert chat.count(tokenizer.bos_id) == 1
    if "spelled" not in content:  # in a plain prompt, spelled control tokens are control tokens
        text = tokenizer.render_chat(messages)
        assert tokens_of(client, "/v1/completions", {"prompt": text}) == chat


def test_a_completion_follows_the_tokenizers_flag(asking):
    for adds in (True, False):
        client, tokenizer = asking(adds, None)
        tokens = tokens_of(client, "/v1/completions", {"prompt": "The work"})
        assert (tokens[0] == tokenizer.bos_id) == adds
        assert tokens[adds:] == tokenizer.encode("The work", add_bos=False)


@pytest.mark.parametrize("beginning", [[], [0], [1, 1]])
def test_token_ids_are_left_alone(asking, beginning):
    client, _ = asking(True, None)
    prompt = [*beginning, 40, 41]
    assert tokens_of(client, "/v1/completions", {"prompt": prompt}) == prompt


def test_a_chat_without_a_template_is_refused_and_a_completion_is_not(asking):
    client, _ = asking(True, None)
    status, _, reply = client.post("/v1/chat/completions", CHAT)
    assert status == 400
    assert "no chat template: send a plain prompt" in reply["error"]["message"]
    assert reply["error"]["param"] == "messages"
    assert client.backend.requests == []
    assert tokens_of(client, "/v1/completions", {"prompt": "The work"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_keeps_the_space_it_begins_with_and_a_chat_has_none(serve, stream):
    """SentencePiece puts a space before every text: in the middle of one it is the text's own."""
    tokenizer = Tokenizer(sentencepiece()[0], replace(sentencepiece()[1], chat_template=TURNS))
    backend = ScriptedBackend(eos=False)
    backend.tokens = tokenizer.encode("of 😀")
    messages = [{"role": "user", "content": "The work"}]

    def text_of(path, **fields):
        fields |= {"max_tokens": len(backend.tokens)}
        if not stream:
            status, _, reply = client.post(path, fields)
            assert status == 200, reply
            choice = reply["choices"][0]
            return choice["text"] if "text" in choice else choice["message"]["content"]
        choices = [event["choices"][0] for event in client.stream(path, **fields)]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    with serve(backend, tokenizer) as client:
        assert text_of("/v1/completions", prompt="The work") == " of 😀"
        assert text_of("/v1/completions", prompt="The work", echo=True) == "The work of 😀"
        ids = tokenizer.encode("The work")
        assert text_of("/v1/completions", prompt=ids, echo=True) == "The work of 😀"
        assert text_of("/v1/completions", prompt="The work", stop=" o") == ""
        assert text_of("/v1/chat/completions", messages=messages) == "of 😀"


def test_a_template_that_refuses_is_the_clients_error_in_its_own_words(asking):
    client, _ = asking(True, "{{ raise_exception('roles must alternate') }}")
    status, _, reply = client.post("/v1/chat/completions", CHAT)
    assert status == 400
    assert "roles must alternate" in reply["error"]["message"]

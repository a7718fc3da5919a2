"""The official `openai` client, sync and async, against our API: what it parses is what was said."""

import asyncio
from contextlib import contextmanager

import pytest
from fakes.answers import ScriptedBackend
from openai import AsyncOpenAI, BadRequestError, OpenAI

TEXT = "Zwölf Boxkämpfer 🥊 jagen Viktor"
CHAT = [{"role": "user", "content": "hi"}]


def settings(client):
    return {"base_url": f"http://127.0.0.1:{client.port}/v1", "api_key": "none", "max_retries": 0}


@contextmanager
def official(serve, **fields):
    with serve(ScriptedBackend(TEXT, step=2, **fields)) as client, OpenAI(**settings(client)) as openai:
        yield openai


def test_models(serve):
    with official(serve) as openai:
        assert [model.id for model in openai.models.list()] == ["fake"]
        assert openai.models.retrieve("fake").id == "fake"


def test_whole_answers(serve):
    with official(serve) as openai:
        completion = openai.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=100)
        chat = openai.chat.completions.create(model="fake", messages=CHAT, n=2, seed=1, stop=["jagen"])
    assert [choice.text for choice in completion.choices] == [TEXT] * 4
    assert completion.usage.prompt_tokens == 2
    assert [choice.message.content for choice in chat.choices] == [TEXT.partition("jagen")[0]] * 2
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("include_usage", [None, False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_streams_and_their_usage(serve, include_usage, n):
    """ggml-org/llama.cpp#15443: the chunk with usage comes when asked for, last, without choices."""
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    with official(serve) as openai:
        chat = list(openai.chat.completions.create(model="fake", messages=CHAT, n=n, stream=True, **options))
        text = list(
            openai.completions.create(model="fake", prompt="hi", n=n, max_tokens=100, stream=True, **options)
        )
    said, told = [""] * n, [""] * n
    for chunk in chat:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    for chunk in text:
        for choice in chunk.choices:
            told[choice.index] += choice.text
    assert said == told == [TEXT] * n
    for chunks in (chat, text):
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        if include_usage:
            assert chunks[-1].choices == []
            assert chunks[-1].usage.completion_tokens == n * (len(TEXT.encode()) + 1)
        else:
            assert chunks[-1].usage is None
            assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities(serve):
    with official(serve) as openai:
        chat = openai.chat.completions.create(
            model="fake", messages=CHAT, logprobs=True, top_logprobs=3, max_tokens=4
        )
        text = openai.completions.create(model="fake", prompt="hi", echo=True, logprobs=2, max_tokens=0)
        chunks = list(
            openai.chat.completions.create(
                model="fake", messages=CHAT, logprobs=True, top_logprobs=1, max_tokens=4, stream=True
            )
        )
    content = chat.choices[0].logprobs.content
    assert bytes(byte for token in content for byte in token.bytes).decode() == TEXT[:3]
    assert [len(token.top_logprobs) for token in content] == [3] * 4
    assert content[0].top_logprobs[1].token == "b"
    logprobs = text.choices[0].logprobs
    assert text.choices[0].text == "hi"
    assert (logprobs.tokens, logprobs.token_logprobs) == (["h", "i"], [None, -1.5])
    assert logprobs.top_logprobs == [None, {"a": -2.0, "b": -3.0, "i": -1.5}]
    streamed = [token for chunk in chunks if chunk.choices for token in _content(chunk)]
    assert [token.token for token in streamed] == [token.token for token in content]


def _content(chunk):
    logprobs = chunk.choices[0].logprobs
    return logprobs.content if logprobs else []


def test_an_answer_goes_into_the_next_request_as_it_came(serve):
    with official(serve) as openai:
        first = openai.chat.completions.create(model="fake", messages=CHAT)
        messages = [*CHAT, first.choices[0].message, *CHAT]
        assert (
            openai.chat.completions.create(model="fake", messages=messages).choices[0].message.content == TEXT
        )
        for said in (first.choices[0].message.model_dump(), first.choices[0].message.to_dict()):
            openai.chat.completions.create(model="fake", messages=[*CHAT, said, *CHAT])


def test_async_client(serve):
    async def ask(client):
        async with AsyncOpenAI(**settings(client)) as openai:
            whole = openai.completions.create(model="fake", prompt="hi", max_tokens=100)
            answers = await asyncio.gather(whole, stream(openai), stream(openai))
            return answers[0].choices[0].text, *answers[1:]

    async def stream(openai):
        said = ""
        chunks = await openai.chat.completions.create(model="fake", messages=CHAT, stream=True)
        async for chunk in chunks:
            said += chunk.choices[0].delta.content or ""
        return said

    with serve(ScriptedBackend(TEXT, step=2)) as client:
        assert asyncio.run(ask(client)) == (TEXT, TEXT, TEXT)


def test_what_is_not_supported_is_refused_by_name(serve):
    with official(serve) as openai:
        tool = {"type": "function", "function": {"name": "f"}}
        with pytest.raises(BadRequestError) as refused:
            openai.chat.completions.create(model="fake", messages=CHAT, tools=[tool])
        assert (refused.value.param, refused.value.code) == ("tools", "unsupported_field")
        with pytest.raises(BadRequestError) as refused:
            openai.completions.create(model="fake", prompt="hi", temperature=3)
        assert refused.value.param == "temperature"
        assert openai.completions.create(model="fake", prompt="hi").choices[0].text

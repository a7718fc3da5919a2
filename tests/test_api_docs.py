"""docs/api.md names every field that the API knows, and whether it is refused."""

import re
from pathlib import Path

import msgspec
import openai.types
import openai.types.chat
import pytest

from mooncake_jax.frontend.schema import ChatBody, CompletionBody, Options

DOCS = (Path(__file__).parent.parent / "docs" / "api.md").read_text()


def section(title: str) -> dict[str, str]:
    """Field → what its row says."""
    text = DOCS.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return {name: row[1].strip() for row in rows for name in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize(
    ("body", "title"),
    [(CompletionBody, "`/v1/completions` alone"), (ChatBody, "`/v1/chat/completions` alone")],
)
def test_every_field_has_a_row_that_tells_whether_it_is_refused(body, title):
    both, own = section("Fields of both"), section(title)
    shared = {field.name for field in msgspec.structs.fields(Options)}
    fields = {field.name: field.type for field in msgspec.structs.fields(body)}
    assert set(both) == shared
    assert set(own) == set(fields) - shared
    refused = {name for name, kind in fields.items() if kind is type(None) or kind is None}
    assert {name for name, what in (both | own).items() if what == "refused"} == refused


@pytest.mark.parametrize(
    ("body", "official"),
    [
        (CompletionBody, openai.types.completion_create_params.CompletionCreateParamsStreaming),
        (ChatBody, openai.types.chat.completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_official_client_is_known(body, official):
    ours = {field.name for field in msgspec.structs.fields(body)}
    assert set(official.__annotations__) <= ours
    assert len(official.__annotations__) > 15


def test_what_is_called_an_extension_is_what_the_official_client_does_not_have():
    official = {
        *openai.types.completion_create_params.CompletionCreateParamsStreaming.__annotations__,
        *openai.types.chat.completion_create_params.CompletionCreateParamsStreaming.__annotations__,
    }
    rows = section("Fields of both")
    assert {name for name, what in rows.items() if what == "extension"} == set(rows) - official

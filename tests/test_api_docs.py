"""docs/api.md names every field that the API knows, and whether it is refused."""

import re
from pathlib import Path

import msgspec
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

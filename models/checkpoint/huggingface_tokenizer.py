"""The tokenizer of a Hugging Face folder: tokenizer.json or tokenizer.model, and the files around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from models.checkpoint.errors import CheckpointError
from models.checkpoint.json_file import read_json
from models.tokenizer import (
    AddedToken,
    Backend,
    Tokenizer,
    TokenizerError,
    TokenizerSettings,
    add_tokens,
    read_backend,
    read_sentencepiece,
    sentencepiece_bpe,
)

JSON_FILE, SENTENCEPIECE_FILE, ABOUT_FILE = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


def read_tokenizer(folder: Path, config: dict[str, Any], vocab_size: int) -> Tokenizer | None:
    """The folder's tokenizer.json, or else its tokenizer.model; None if it has neither.

    End tokens are the union of all files', the tokenizer's first. Whether BOS is added is tokenizer_config's
    `add_bos_token`, or else what tokenizer.json's post-processor does (yes for tokenizer.model). Raises
    CheckpointError naming the file.
    """
    try:
        about = read_json(folder / ABOUT_FILE, optional=True)
        if (found := _vocabulary(folder, about)) is None:
            return None
        generation = read_json(folder / GENERATION_FILE, optional=True)
        bos = [
            *_named(folder, about, "bos_token", found),
            *_ids(folder / CONFIG_FILE, config, "bos_token_id"),
            *_known(found.bos_id),
        ]
        ends = [
            *_named(folder, about, "eos_token", found),
            *_ids(folder / CONFIG_FILE, config, "eos_token_id"),
            *_ids(folder / GENERATION_FILE, generation, "eos_token_id"),
            *_known(found.eos_id),
        ]
        for index in (*bos, *ends):
            if not 0 <= index < vocab_size:
                raise CheckpointError(
                    f"{folder}: BOS or EOS id {index} lies outside the vocabulary of {vocab_size}"
                )
        if not isinstance(adds_bos := about.get("add_bos_token"), bool):
            adds_bos = bool(bos) and found.begins_with(bos[0])
        settings = TokenizerSettings(
            bos_id=bos[0] if bos else None,
            eos_ids=tuple(dict.fromkeys(ends)),
            add_bos=adds_bos,
            chat_template=_chat_template(folder, about),
        )
        return Tokenizer(found.backend, settings)
    except TokenizerError as error:
        raise CheckpointError(f"{folder}: {error}") from error


class _Vocabulary(NamedTuple):
    """What the tokenizer's own file says; ids are -1 where it does not."""

    file: str
    backend: Backend
    bos_id: int = -1
    eos_id: int = -1

    def begins_with(self, bos_id: int) -> bool:
        """Whether a text gets BOS: as the post-processor does it; always in SentencePiece."""
        return self.file == SENTENCEPIECE_FILE or self.backend.encode("x").ids[:1] == [bos_id]


def _vocabulary(folder: Path, about: dict[str, Any]) -> _Vocabulary | None:
    if (folder / JSON_FILE).exists():
        return _Vocabulary(JSON_FILE, read_backend(folder / JSON_FILE))
    if not (path := folder / SENTENCEPIECE_FILE).exists():
        return None
    model = read_sentencepiece(path)
    # As in transformers: without `legacy: false`, the text after a control token begins with a space too.
    prefix = "never" if not model.adds_prefix else "first" if about.get("legacy") is False else "every"
    try:
        backend = sentencepiece_bpe(model.pieces, prefix=prefix)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    try:
        add_tokens(backend, _added_tokens(folder, about))
    except ValueError as error:
        raise CheckpointError(f"{folder / ABOUT_FILE}: {error}") from error
    return _Vocabulary(SENTENCEPIECE_FILE, backend, model.bos_id, model.eos_id)


def _added_tokens(folder: Path, about: dict[str, Any]) -> dict[int, AddedToken]:
    """`added_tokens_decoder` of tokenizer_config.json, and what only added_tokens.json has."""
    try:
        names = read_json(folder / "added_tokens.json", optional=True)
        tokens = {int(index): AddedToken(text) for text, index in names.items()}
        for index, token in (about.get("added_tokens_decoder") or {}).items():
            flags = (bool(token.get(name, False)) for name in ("special", "lstrip", "rstrip"))
            tokens[int(index)] = AddedToken(token["content"], *flags)
        return tokens
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: added tokens that cannot be read: {error}") from error


def _named(folder: Path, about: dict[str, Any], name: str, found: _Vocabulary) -> list[int]:
    """The id of the token that tokenizer_config.json calls `name`; none if it does not."""
    token = about.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return []
    if not isinstance(token, str) or (index := found.backend.token_to_id(token)) is None:
        raise CheckpointError(f"{folder / ABOUT_FILE}: {name} {token!r} is not in {found.file}")
    return [index]


def _known(index: int) -> list[int]:
    return [index] if index >= 0 else []


def _chat_template(folder: Path, about: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    template = about.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / ABOUT_FILE}: chat_template is not text")
    return template


def _ids(path: Path, fields: dict[str, Any], name: str) -> list[int]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{path}: {name} is {value!r:.80}: no token id")
    return ids

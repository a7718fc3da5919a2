"""The tokenizer of a Hugging Face folder: tokenizer.json or tokenizer.model, and the files around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from models.checkpoint.errors import CheckpointError
from models.checkpoint.json_file import read_json
from models.tokenizer import (
    Tokenizer,
    TokenizerError,
    TokenizerSettings,
    read_backend,
    read_sentencepiece,
    sentencepiece_bpe,
)

JSON_FILE, SENTENCEPIECE_FILE, ABOUT_FILE = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"


def read_tokenizer(folder: Path, config: dict[str, Any], vocab_size: int) -> Tokenizer | None:
    """The folder's tokenizer.json, or else its tokenizer.model; None if it has neither.

    End tokens are the union of all files', the tokenizer's first. Whether BOS is added is tokenizer_config's
    `add_bos_token`, or else what tokenizer.json's post-processor does (yes for tokenizer.model). Raises
    CheckpointError naming the file.
    """
    try:
        about = read_json(folder / ABOUT_FILE, optional=True)
        if (folder / JSON_FILE).exists():
            file, backend, bos, ends, adds_bos = (
                folder / JSON_FILE,
                read_backend(folder / JSON_FILE),
                [],
                [],
                None,
            )
        elif (folder / SENTENCEPIECE_FILE).exists():
            file, adds_bos = folder / SENTENCEPIECE_FILE, True
            backend, bos, ends = _from_sentencepiece(folder, about)
        else:
            return None
        generation = read_json(folder / "generation_config.json", optional=True)

        def token_id(name: str) -> list[int]:
            token = about.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token is None:
                return []
            if not isinstance(token, str) or (index := backend.token_to_id(token)) is None:
                raise CheckpointError(f"{folder / ABOUT_FILE}: {name} {token!r} is not in {file.name}")
            return [index]

        bos = [*token_id("bos_token"), *_ids(config.get("bos_token_id")), *bos]
        ends = [
            *token_id("eos_token"),
            *_ids(config.get("eos_token_id")),
            *_ids(generation.get("eos_token_id")),
            *ends,
        ]
        for index in (*bos, *ends):
            if not 0 <= index < vocab_size:
                raise CheckpointError(
                    f"{folder}: BOS or EOS id {index} lies outside the vocabulary of {vocab_size}"
                )
        if isinstance(wanted := about.get("add_bos_token"), bool):
            adds_bos = wanted
        elif adds_bos is None:
            adds_bos = bool(bos) and backend.encode("x").ids[:1] == bos[:1]
        settings = TokenizerSettings(
            bos_id=bos[0] if bos else None,
            eos_ids=tuple(dict.fromkeys(ends)),
            add_bos=adds_bos,
            chat_template=_chat_template(folder, about),
        )
        return Tokenizer(backend, settings)
    except TokenizerError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _from_sentencepiece(
    folder: Path, about: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, list[int], list[int]]:
    """Tokenizer, BOS and EOS of tokenizer.model, with the tokens that the files around it add."""
    model = read_sentencepiece(folder / SENTENCEPIECE_FILE)
    # As in transformers: without `legacy: false`, the text after a control token begins with a space too.
    prefix = "never" if not model.adds_prefix else "first" if about.get("legacy") is False else "every"
    try:
        backend = sentencepiece_bpe(model.pieces, prefix=prefix)
    except ValueError as error:
        raise CheckpointError(f"{folder / SENTENCEPIECE_FILE}: {error}") from error
    added = dict(sorted(_added_tokens(folder, about).items()))
    for index, token in added.items():
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        elif token.special:
            backend.add_special_tokens([token])
        if (have := backend.token_to_id(token.content)) != index:
            raise CheckpointError(
                f"{folder / ABOUT_FILE}: added token {token.content!r} has id {index}, but is {have} in the "
                f"vocabulary of {SENTENCEPIECE_FILE} and the tokens added before it"
            )
    return backend, _known(model.bos_id), _known(model.eos_id)


def _added_tokens(folder: Path, about: dict[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """`added_tokens_decoder` of tokenizer_config.json, and what only added_tokens.json has."""
    try:
        names = {int(i): text for text, i in read_json(folder / "added_tokens.json", optional=True).items()}
        tokens = {
            i: tokenizers.AddedToken(text, special=False, normalized=False) for i, text in names.items()
        }
        for index, token in (about.get("added_tokens_decoder") or {}).items():
            tokens[int(index)] = tokenizers.AddedToken(
                token["content"],
                special=bool(token.get("special", False)),
                normalized=False,
                lstrip=bool(token.get("lstrip", False)),
                rstrip=bool(token.get("rstrip", False)),
            )
        return tokens
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: added tokens that cannot be read: {error}") from error


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
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / ABOUT_FILE}: chat_template is not text")
    return template


def _ids(value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"BOS or EOS id {value!r} is not a token id")
    return ids

"""The tokenizer of one model: BPE in Rust, and around it the rules for BOS, end tokens and chat."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from models.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from models.tokenizer.detokenizer import Detokenizer, Pieces
from models.tokenizer.errors import TokenizerError

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_settings.json"
_MARK = "\U0010fffe"  # a noncharacter: no text of a user may hold it


@dataclass(frozen=True)
class TokenizerSettings:
    """What tokenizer.json does not say. Each of `eos_ids` ends an answer."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None


class Tokenizer:
    """Encodes prompts and chats, decodes answers. Immutable; one object serves all threads."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings):
        """Raises TokenizerError where the settings do not fit the vocabulary."""
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self.settings = settings
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        for name, index in (("BOS", settings.bos_id), *(("EOS", i) for i in settings.eos_ids)):
            if index is not None and not 0 <= index < self.vocab_size:
                raise TokenizerError(f"{name} id {index} lies outside the vocabulary of {self.vocab_size}")
        if settings.add_bos and settings.bos_id is None:
            raise TokenizerError("the tokenizer asks for BOS before every prompt, but names no BOS token")
        decoder = json.loads(backend.to_str())["decoder"]
        try:
            self._pieces = Pieces(backend, decoder)
        except ValueError as error:
            raise TokenizerError(str(error)) from error

    @property
    def bos_id(self) -> int | None:
        return self.settings.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.settings.eos_ids

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text → id of the control tokens: they mean something to the model, and decoding drops them."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in sorted(added.items()) if token.special}

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Ids of `text`; control tokens written in it count as such.

        `add_bos` None: as the model's files say. BOS is never put before a text that begins with it. Raises
        TokenizerError for text that is not Unicode.
        """
        ids = self._ids(self._backend, text)
        want = self.settings.add_bos if add_bos is None else add_bos
        if not want:
            return ids
        if self.bos_id is None:
            raise TokenizerError("this tokenizer has no BOS token to add")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        whole = self.detokenizer(skip_special)
        return whole.push(token_ids) + whole.flush()

    def detokenizer(self, skip_special: bool = True, *, continues: bool = False) -> Detokenizer:
        """A new incremental decoder for one answer.

        `continues`: the answer goes on in the middle of a text, so that a space it begins with is kept; else
        it is a text of its own, as for `decode`.
        """
        return Detokenizer(self._pieces, skip_special, continues=continues)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, control tokens by their name; not always UTF-8 by themselves."""
        return self._pieces.of(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The chat template's text for `messages` (`role` and `content` each). Raises ChatTemplateError."""
        return self._chat_template.render(messages, add_generation_prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat: rendered, then encoded, BOS exactly once where the model wants it.

        Unlike in Hugging Face's `apply_chat_template`, control tokens spelled out in a message stay plain
        text: only the template can open or end a turn. Everything else encodes alike. Raises
        ChatTemplateError, TokenizerError.
        """
        if self._spelled is None or not _any_string(messages, self._spelled.search):
            return self.encode(self.render_chat(messages, add_generation_prompt))
        if _any_string(messages, lambda text: _MARK in text):
            raise TokenizerError(f"a message holds the noncharacter U+{ord(_MARK):X}")
        pattern = self._spelled
        broken = _map_strings(messages, lambda text: pattern.sub(lambda m: m[0][0] + _MARK + m[0][1:], text))
        text = self.render_chat(broken, add_generation_prompt)
        ids: list[int] = []
        for index, part in enumerate(re.split(f"({pattern.pattern})", text)):
            if index % 2:
                ids.append(self.special_tokens[part])
            elif part:
                ids += self._ids(self._plain_backends[index > 0], part.replace(_MARK, ""))
        if self.settings.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and our settings beside it into `folder`, made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / TOKENIZER_FILE), pretty=False)
        (folder / SETTINGS_FILE).write_text(
            json.dumps(asdict(self.settings), ensure_ascii=False, indent=1) + "\n"
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read what `save` wrote; raises TokenizerError naming the file."""
        path = Path(folder) / SETTINGS_FILE
        try:
            fields = json.loads(path.read_text())
            fields["eos_ids"] = tuple(fields["eos_ids"])
            settings = TokenizerSettings(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TokenizerError(f"{path}: not a tokenizer's settings: {error}") from error
        return cls(read_backend(Path(folder) / TOKENIZER_FILE), settings)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self.settings.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template: send a plain prompt instead of messages"
            )

        def name(token_id: int) -> str:
            return self._backend.id_to_token(token_id) or ""

        return ChatTemplate(
            self.settings.chat_template,
            bos_token="" if self.bos_id is None else name(self.bos_id),
            eos_token="" if not self.eos_ids else name(self.eos_ids[0]),
        )

    @cached_property
    def _spelled(self) -> re.Pattern[str] | None:
        """Finds control tokens in text, the longest where several begin; None if the model has none."""
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @cached_property
    def _plain_backends(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
        """Twins to which control tokens are ordinary text: for the beginning of a prompt, and for what follows."""
        fields = json.loads(self._backend.to_str())
        splitter = fields["pre_tokenizer"] or {}
        twins = []
        for scheme in ("first", "never"):
            if splitter.get("type") == "Metaspace" and splitter.get("prepend_scheme") == "first":
                splitter = fields["pre_tokenizer"] = splitter | {"prepend_scheme": scheme}
            twins.append(tokenizers.Tokenizer.from_str(json.dumps(fields)))
            twins[-1].encode_special_tokens = True
        return twins[0], twins[1]

    def _ids(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text is not Unicode: lone surrogate at character {error.start}") from error
        return backend.encode(text, add_special_tokens=False).ids


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json; raises TokenizerError naming it."""
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise TokenizerError(f"{path}: not a tokenizer.json: {error}") from error


def _any_string(value: Any, test: Any) -> bool:
    if isinstance(value, str):
        return bool(test(value))
    if isinstance(value, Mapping):
        return any(_any_string(v, test) for v in value.values())
    return isinstance(value, Sequence) and any(_any_string(v, test) for v in value)


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _map_strings(v, change) for k, v in value.items()}
    return [_map_strings(v, change) for v in value] if isinstance(value, Sequence) else value

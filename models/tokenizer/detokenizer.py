"""Token ids back to text, whole or piece by piece: bytes are joined first, and read as UTF-8 after that."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letter byte-level BPE writes for each byte: printable Latin-1 itself, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


class Pieces:
    """The bytes that each token stands for, under one of the two decoders of the Llama family.

    Byte-level (GPT-2 style letters), or SentencePiece style: `▁` for a space and `<0xNN>` for a byte that the
    vocabulary has no token for. `strips_space`: the text's first space belongs to the encoding, not to the
    text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None):
        """`decoder` is the `decoder` field of tokenizer.json; raises ValueError for kinds we do not know."""
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}
        steps = (decoder or {}).get("decoders", [decoder]) if decoder else []
        kinds = {step["type"] for step in steps}
        self._byte_level = kinds == {"ByteLevel"}
        sentencepiece = bool(kinds) and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if not self._byte_level and not sentencepiece:
            raise ValueError(
                f"tokenizer decoder {sorted(kinds) or None}: expected ByteLevel or SentencePiece style"
            )
        self.strips_space = any(
            (step["type"] == "Strip" and step.get("start") == 1)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )

    def is_special(self, token_id: int) -> bool:
        token = self._added.get(token_id)
        return token is not None and token.special

    def of(self, token_id: int) -> bytes:
        """The bytes of `token_id`; empty for an id without a token (vocabularies are padded)."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._derive(token_id)
        return piece

    def _derive(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            letters = [_BYTE_OF_LETTER.get(c) for c in token]
            return token.encode() if None in letters else bytes(b for b in letters if b is not None)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()


class Detokenizer:
    """Text of one growing answer: what `push` and `flush` returned, joined, decodes all ids at once.

    Constant work per token. A character is given out only when all its bytes are there; bytes that can never
    become a character are U+FFFD, as they are for a whole text. One object per answer; not shared between
    threads.
    """

    def __init__(self, pieces: Pieces, skip_special: bool = True, *, continues: bool = False):
        """`continues`: the ids follow a text, so that a space they begin with is the text's own."""
        self._pieces = pieces
        self._skip_special = skip_special
        self._strip = pieces.strips_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these further tokens complete; possibly empty."""
        joined = b"".join(
            self._pieces.of(i) for i in token_ids if not (self._skip_special and self._pieces.is_special(i))
        )
        if self._strip and joined:
            self._strip = False
            joined = joined.removeprefix(b" ")
        return self._utf8.decode(joined)

    def flush(self) -> str:
        """What is left at the end of the answer: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)

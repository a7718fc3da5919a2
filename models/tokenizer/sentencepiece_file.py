"""`tokenizer.model` files: a SentencePiece `ModelProto`, of which we read the fields that decide how text splits.

Field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from models.tokenizer.errors import TokenizerError
from models.tokenizer.sentencepiece import Piece, PieceKind

_BPE = 2
_MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


class SentencePieceModel(NamedTuple):
    """`adds_prefix`: a space goes before the text. Ids are -1 where the model has no such token."""

    pieces: list[Piece]
    bos_id: int
    eos_id: int
    adds_prefix: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a BPE model; raises TokenizerError for other kinds, and for text normalisation, naming the file."""
    try:
        model = _Message(path.read_bytes())
        pieces = [_piece(_Message(raw)) for raw in model.many(1)]
        trainer, normalizer = _Message(model.bytes(2)), _Message(model.bytes(3))
        kind = trainer.integer(3, default=1)
        found = {
            f"a {_MODEL_TYPES.get(kind, kind)} model": kind != _BPE,
            "spaces after words": bool(trainer.integer(24, default=0)),
            "normalisation of letters": bool(normalizer.bytes(2)),
            "removal of extra spaces": bool(normalizer.integer(4, default=1)),
            "unescaped spaces": not normalizer.integer(5, default=1),
        }
        bos_id, eos_id = trainer.integer(41, default=1), trainer.integer(42, default=2)
        adds_prefix = bool(normalizer.integer(3, default=1))
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from error
    except (ValueError, struct.error) as error:
        raise TokenizerError(f"{path}: not a SentencePiece model: {error}") from error
    if not pieces:
        raise TokenizerError(f"{path}: not a SentencePiece model: it has no pieces")
    if unsupported := [what for what, is_so in found.items() if is_so]:
        raise TokenizerError(
            f"{path}: {', '.join(unsupported)}; of SentencePiece only BPE of text as it is, is supported: "
            "use a tokenizer.json"
        )
    return SentencePieceModel(pieces, bos_id, eos_id, adds_prefix)


def _piece(message: _Message) -> Piece:
    return Piece(message.bytes(1).decode(), message.real(2), PieceKind(message.integer(3, default=1)))


class _Message:
    """The fields of one protobuf message; of a field that stands twice, the last counts."""

    def __init__(self, raw: bytes):
        self._fields: dict[int, list[int | bytes]] = {}
        for number, value in _fields(raw):
            self._fields.setdefault(number, []).append(value)

    def many(self, number: int) -> list[bytes]:
        values = self._fields.get(number, [])
        if not all(isinstance(value, bytes) for value in values):
            raise ValueError(f"field {number} is not of bytes")
        return [value for value in values if isinstance(value, bytes)]

    def bytes(self, number: int) -> bytes:
        return self.many(number)[-1] if number in self._fields else b""

    def integer(self, number: int, default: int) -> int:
        value = self._fields.get(number, [default])[-1]
        if not isinstance(value, int):
            raise ValueError(f"field {number} is not an integer")
        return value - (1 << 64) if value >= 1 << 63 else value

    def real(self, number: int) -> float:
        return struct.unpack("<f", self.bytes(number) or bytes(4))[0]


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message; fixed-size values come as their bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(raw) or shift > 63:
                raise ValueError("it ends or breaks inside a number")
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value & (1 << 64) - 1

    while at < len(raw):
        tag = varint()
        match tag & 7:
            case 0:
                yield tag >> 3, varint()
                continue
            case 1:
                length = 8
            case 2:
                length = varint()
            case 5:
                length = 4
            case wire_type:
                raise ValueError(f"wire type {wire_type} of field {tag >> 3}")
        if at + length > len(raw):
            raise ValueError(f"it ends inside field {tag >> 3}")
        yield tag >> 3, raw[at : at + length]
        at += length

"""SentencePiece BPE, the tokenizer of Llama 1 and 2, as a `tokenizers` BPE: merges in the order of the scores."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

SPACE = "▁"
Prefix = Literal["every", "first", "never"]


class PieceKind(IntEnum):
    """What a piece is for: the numbers of SentencePiece's model files, and of GGUF's `token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of a vocabulary, in id order."""

    text: str
    score: float
    kind: PieceKind


def sentencepiece_bpe(pieces: Sequence[Piece], *, prefix: Prefix) -> tokenizers.Tokenizer:
    """Pieces in id order as a tokenizer that splits as SentencePiece does.

    Two neighbours merge where the vocabulary has the whole, the best score first. `prefix`: a space is put
    before every stretch of text between control tokens, before the first only (unless it begins with one, as
    in transformers), or never. Control and unknown pieces are special tokens (found in text, dropped when
    decoding); user-defined ones are found whole, and text after them counts as a new stretch, as in
    transformers and llama.cpp. A letter without a piece becomes its bytes. Raises ValueError.
    """
    vocab = {piece.text: i for i, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        double = next(piece.text for i, piece in enumerate(pieces) if vocab[piece.text] != i)
        raise ValueError(f"token {double!r} stands twice in the vocabulary")
    unknown = [piece.text for piece in pieces if piece.kind == PieceKind.UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"{len(unknown)} unknown tokens; a SentencePiece vocabulary has exactly one")
    num_bytes = sum(piece.kind == PieceKind.BYTE for piece in pieces)
    if num_bytes not in (0, 256):
        raise ValueError(f"{num_bytes} byte tokens; a vocabulary has all 256 or none")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(pieces),
            unk_token=unknown[0],
            fuse_unk=True,
            byte_fallback=num_bytes > 0,
        )
    )
    # the setters are wider than their declared types
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix == "every" else []
        steps.append(normalizers.Replace(" ", SPACE))
        backend.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    ends = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    backend.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    special = (PieceKind.CONTROL, PieceKind.UNKNOWN)
    backend.add_tokens(
        [
            tokenizers.AddedToken(piece.text, special=piece.kind in special, normalized=False)
            for piece in pieces
            if piece.kind in (*special, PieceKind.USER_DEFINED)
        ]
    )
    return backend


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first; all ways of one piece stand together."""
    parts = {p.text for p in pieces if p.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED)}
    wholes = sorted((p for p in pieces if p.kind == PieceKind.NORMAL), key=lambda p: -p.score)
    return [
        (left, right)
        for whole in wholes
        for cut in range(1, len(whole.text))
        if (left := whole.text[:cut]) in parts and (right := whole.text[cut:]) in parts
    ]

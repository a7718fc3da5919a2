"""The tokenizer in a GGUF file's metadata: byte-level BPE or SentencePiece."""

from __future__ import annotations

from models.checkpoint.errors import CheckpointError
from models.checkpoint.gguf_fields import GGUFFields
from models.checkpoint.gguf_file import GGUFFile
from models.tokenizer import (
    Backend,
    Piece,
    PieceKind,
    Tokenizer,
    TokenizerSettings,
    byte_level_bpe,
    sentencepiece_bpe,
)

# Llama 3 ends answers with any of these, of which its files name one.
_LLAMA3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer from the metadata; raises CheckpointError for other kinds than those two."""
    fields = GGUFFields(file)
    tokens = fields.items("tokenizer.ggml.tokens", str)
    kinds = fields.items("tokenizer.ggml.token_type", int, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{file.path}: {len(tokens)} tokens, but {len(kinds)} of tokenizer.ggml.token_type"
        )
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot", "eom")]
    bos = fields.get("tokenizer.ggml.bos_token_id", int, -1)
    try:
        match fields.get("tokenizer.ggml.model", str):
            case "gpt2":
                pre = fields.get("tokenizer.ggml.pre", str, "default")
                backend, adds_bos = _byte_level(fields, tokens, kinds, pre), pre.startswith("llama")
                ends += [
                    i for i, t in enumerate(tokens) if t in _LLAMA3_ENDS and kinds[i] == PieceKind.CONTROL
                ]
            case "llama":
                backend, adds_bos = _sentencepiece(fields, tokens, kinds), True
                bos = 1 if bos < 0 else bos
                ends[0] = 2 if ends[0] < 0 else ends[0]
            case kind:
                raise CheckpointError(
                    f"{file.path}: tokenizer model {kind!r}; from GGUF byte-level BPE ('gpt2') and "
                    "SentencePiece BPE ('llama') are supported: use the model's Hugging Face folder"
                )
        settings = TokenizerSettings(
            bos_id=bos if bos >= 0 else None,
            eos_ids=tuple(dict.fromkeys(i for i in ends if i >= 0)),
            add_bos=fields.get("tokenizer.ggml.add_bos_token", bool, adds_bos),
            chat_template=fields.get("tokenizer.chat_template", str, "") or None,
        )
        return Tokenizer(backend, settings)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _byte_level(fields: GGUFFields, tokens: list[str], kinds: list[int], pre: str) -> Backend:
    return byte_level_bpe(
        tokens,
        fields.items("tokenizer.ggml.merges", str),
        pre_tokenizer=pre,
        control=[i for i, kind in enumerate(kinds) if kind == PieceKind.CONTROL],
        user_defined=[i for i, kind in enumerate(kinds) if kind == PieceKind.USER_DEFINED],
    )


def _sentencepiece(fields: GGUFFields, tokens: list[str], kinds: list[int]) -> Backend:
    if fields.get("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        raise ValueError("tokenizer.ggml.remove_extra_whitespaces is set; only text as it is, is supported")
    scores = fields.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, but {len(scores)} of tokenizer.ggml.scores")
    pieces = [Piece(*entry) for entry in zip(tokens, scores, map(PieceKind, kinds), strict=True)]
    prefix = "every" if fields.get("tokenizer.ggml.add_space_prefix", bool, True) else "never"
    return sentencepiece_bpe(pieces, prefix=prefix)

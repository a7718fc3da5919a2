"""Text to token ids and back: tokenizer, chat template, incremental detokenizer. Needs no jax."""

from models.tokenizer.added import AddedToken, Backend, add_tokens
from models.tokenizer.bpe import PRE_TOKENIZERS, byte_level_bpe
from models.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from models.tokenizer.detokenizer import Detokenizer
from models.tokenizer.errors import TokenizerError
from models.tokenizer.sentencepiece import Piece, PieceKind, sentencepiece_bpe
from models.tokenizer.sentencepiece_file import read_sentencepiece
from models.tokenizer.tokenizer import Tokenizer, TokenizerSettings, read_backend

__all__ = [
    "PRE_TOKENIZERS",
    "AddedToken",
    "Backend",
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "Piece",
    "PieceKind",
    "Tokenizer",
    "TokenizerError",
    "TokenizerSettings",
    "add_tokens",
    "byte_level_bpe",
    "read_backend",
    "read_sentencepiece",
    "sentencepiece_bpe",
]

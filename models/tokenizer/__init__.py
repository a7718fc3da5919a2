"""Text to token ids and back: tokenizer, chat template, incremental detokenizer. Needs no jax."""

from models.tokenizer.bpe import PRE_TOKENIZERS, byte_level_bpe
from models.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from models.tokenizer.detokenizer import Detokenizer
from models.tokenizer.tokenizer import Tokenizer, TokenizerError, TokenizerSettings, read_backend

__all__ = [
    "PRE_TOKENIZERS",
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "Tokenizer",
    "TokenizerError",
    "TokenizerSettings",
    "byte_level_bpe",
    "read_backend",
]

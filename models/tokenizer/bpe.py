"""A byte-level BPE tokenizer from plain lists, as a GGUF file's metadata gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import Regex, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splits(*patterns: str) -> PreTokenizer:
    """Cut at every match of each pattern in turn, keeping the matches, then map bytes to their letters."""
    steps: list[PreTokenizer] = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: _splits(_GPT2),
    "smollm": lambda: _splits(r"\p{N}", _GPT2),
    "llama-bpe": lambda: _splits(_LLAMA3),
    "default": lambda: _splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_ALIASES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "": "default"}


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    pre_tokenizer: str,
    control: Sequence[int] = (),
    user_defined: Sequence[int] = (),
) -> tokenizers.Tokenizer:
    """Tokens in id order and merges ("left right", best first) as a tokenizer.

    `pre_tokenizer` is the name in `tokenizer.ggml.pre`. `control` ids are special tokens (found in text,
    dropped when decoding); `user_defined` ids are found in text whole, and stay when decoding. Raises
    ValueError.
    """
    name = _ALIASES.get(pre_tokenizer, pre_tokenizer)
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(f"pre-tokenizer {pre_tokenizer!r} is not supported; known: {known}")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        double = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ValueError(f"token {double!r} stands twice in the vocabulary")
    for index in (*control, *user_defined):
        if not 0 <= index < len(tokens):
            raise ValueError(f"special token id {index} lies outside the vocabulary of {len(tokens)}")
    pairs = [_pair(merge) for merge in merges]
    try:
        # The llama-bpe family looks a whole word up in the vocabulary before it merges.
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=name == "llama-bpe")
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(f"vocabulary and merges disagree: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    added = [(i, True) for i in control] + [(i, False) for i in user_defined]
    backend.add_tokens(
        [tokenizers.AddedToken(tokens[i], special=special, normalized=False) for i, special in sorted(added)]
    )
    return backend


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ValueError(f"merge {merge!r} is not two tokens separated by a space")
    return merge[:cut], merge[cut + 1 :]

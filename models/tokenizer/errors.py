"""What is wrong with a tokenizer or with text, in one exception."""


class TokenizerError(ValueError):
    """Tokenizer files that are missing or disagree, or text that cannot be encoded."""

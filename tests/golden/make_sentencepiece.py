"""Makes sentencepiece/ with Google's own library, not needed otherwise.

    python make_sentencepiece.py      (sentencepiece 0.2.3)

tokenizer.model: a BPE model as Llama 2's is made: text as it is, a space put in front, bytes where a letter has
no piece; a control token and a user-defined one besides. texts.json: what sentencepiece splits texts into.
"""

import json
import random
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent / "sentencepiece"
CORPUS = (Path(__file__).parents[2] / "LICENSE").read_text().splitlines()
SPACED = ["a  b   c    d", "    four spaces   and  more        eight", "aa aaa aaaa aaaaa aaaaaa"] * 30
TEXTS = [
    "Once upon  a\n time",
    "The store keeps every block of the work.",
    "",
    " ",
    "  two spaces first",
    " one",
    "tab\there\n\nnew lines\r\n end ",
    "日本語と中文와 한국어",
    "emoji 😀👍🏽 family 👨‍👩‍👧‍👦",
    "a\u0301 cafe\u0301 naïve",
    "aaaaaaaaaaaaaaaaaaaaa                     bbbb",
    "▁already▁there",
    "3.14159 and 1000000 x 007",
    "unknown: ½ ٣ Ⅷ \x00\x7f",
]


def main() -> None:
    HERE.mkdir(exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in CORPUS + SPACED if line.strip()]),
        model_prefix=str(HERE / "tokenizer"),
        model_type="bpe",
        vocab_size=640,
        byte_fallback=True,
        character_coverage=0.999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        control_symbols=["<turn>"],
        user_defined_symbols=["<user>"],
        num_threads=1,
        minloglevel=2,
    )
    (HERE / "tokenizer.vocab").unlink()
    processor = sentencepiece.SentencePieceProcessor(str(HERE / "tokenizer.model"))
    rng = random.Random(3)
    words = [processor.id_to_piece(i).replace("▁", " ") for i in range(263, processor.vocab_size())]
    texts = TEXTS + ["".join(rng.choices([*words, "é", "  ", "\n"], k=12)) for _ in range(40)]
    cases = [
        {"text": text, "ids": processor.encode(text), "decoded": processor.decode(processor.encode(text))}
        for text in texts
    ]
    (HERE / "texts.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()

"""SentencePiece models: split as Google's library splits (golden/make_sentencepiece.py), from every kind of file."""

import itertools
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from golden.folders import gguf_file, hf_folder, random_tensors, tiny_config
from golden.values import SENTENCEPIECE, sentencepiece_texts
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint import CheckpointError, load_text
from models.tokenizer import (
    Piece,
    PieceKind,
    Tokenizer,
    TokenizerError,
    TokenizerSettings,
    read_sentencepiece,
    sentencepiece_bpe,
)

MODEL = SENTENCEPIECE / "tokenizer.model"
TEXTS = sentencepiece_texts()
BOS, EOS, TURN, USER = 1, 2, 3, 4
SETTINGS = TokenizerSettings(bos_id=BOS, eos_ids=(EOS,))
PIECES = read_sentencepiece(MODEL).pieces
OURS = Tokenizer(sentencepiece_bpe(PIECES, prefix="every"), SETTINGS)


def in_gguf(path: Path, **fields) -> Tokenizer:
    """The tokenizer of a GGUF file with this vocabulary, as llama.cpp's converter writes it."""
    about = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.text for piece in PIECES],
        "tokenizer.ggml.scores": [piece.score for piece in PIECES],
        "tokenizer.ggml.token_type": [int(piece.kind) for piece in PIECES],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
    }
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    cfg = replace(tiny_config(), vocab_size=len(PIECES), tie_embeddings=True)
    tokenizer = load_text(gguf_file(path, cfg, random_tensors(cfg), fields=about | fields))[1]
    assert tokenizer is not None
    return tokenizer


def in_folder(path: Path, added: dict[str, int] | None = None, **about) -> Tokenizer:
    """The tokenizer of a Hugging Face folder that has a tokenizer.model and no tokenizer.json."""
    folder = hf_folder(path, vocab_size=len(PIECES) + 10, eos_token_id=EOS, bos_token_id=None)
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).unlink()
    shutil.copy(MODEL, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if added is not None:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = load_text(folder)[1]
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json", "gguf"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizers")
    if request.param == "tokenizer.model":
        return in_folder(path)
    if request.param == "tokenizer.json":
        OURS.save(path)
        return Tokenizer.load(path)
    return in_gguf(path / "m.gguf", scores=[piece.score for piece in PIECES])


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: repr(case["text"])[:30])
def test_texts_split_as_in_sentencepiece_and_come_back(tokenizer, case):
    assert tokenizer.encode(case["text"], add_bos=False) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["decoded"]
    stream = tokenizer.detokenizer()
    assert "".join([*(stream.push([i]) for i in case["ids"]), stream.flush()]) == case["decoded"]


def reference(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, slowly: join the two neighbours of the best score, the leftmost of equals."""
    symbols = list("▁" + text)
    while True:
        joins = [
            (-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores
        ]
        if not joins:
            return symbols
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(
    wholes=st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=20),
    text=st.text("ab", max_size=40),
)
def test_any_vocabulary_splits_by_the_rule(wholes, text):
    letters = [Piece(text, 0.0, PieceKind.NORMAL) for text in ("a", "b", "▁")]
    pieces = [Piece("<unk>", 0.0, PieceKind.UNKNOWN), *letters]
    pieces += [Piece(text, -float(i + 1), PieceKind.NORMAL) for i, text in enumerate(wholes)]
    backend = sentencepiece_bpe(pieces, prefix="every")
    ids = backend.encode(text).ids
    wanted = reference(text, {piece.text: piece.score for piece in pieces[4:]}) if text else []
    assert [pieces[i].text for i in ids] == wanted


def test_without_byte_tokens_a_run_of_unknown_letters_is_one_unknown_token():
    pieces = [Piece("<unk>", 0.0, PieceKind.UNKNOWN), *(Piece(text, 0.0, PieceKind.NORMAL) for text in "▁ab")]
    tokenizer = Tokenizer(sentencepiece_bpe(pieces, prefix="every"), TokenizerSettings())
    assert tokenizer.encode("a日本b") == [1, 2, 0, 3]
    assert tokenizer.decode([1, 2, 0, 3]) == "ab"


@given(ids=st.lists(st.integers(0, len(PIECES) - 1)), continues=st.booleans(), skip_special=st.booleans())
def test_a_stream_of_any_tokens_is_the_decoding_of_the_whole(ids, continues, skip_special):
    stream = OURS.detokenizer(skip_special, continues=continues)
    text = "".join([*(stream.push([i]) for i in ids), stream.flush()])
    whole = OURS.decode(ids, skip_special)
    assert text in (whole, f" {whole}") if continues else text == whole
    library = OURS._backend.decode(ids, skip_special)
    assert whole == library or "\ufffd" in library  # which counts broken bytes in another way


def test_an_answer_that_goes_on_keeps_its_first_space():
    prompt, answer = OURS.encode("The store keeps", add_bos=False), OURS.encode("every block", add_bos=False)
    stream = OURS.detokenizer(continues=True)
    rest = stream.push(answer) + stream.flush()
    assert OURS.decode(prompt) + rest == OURS.decode(prompt + answer) == "The store keeps every block"
    assert OURS.decode(answer) == "every block"


def test_bytes_wait_for_their_character_and_a_broken_one_is_flushed():
    of = {piece.text: i for i, piece in enumerate(PIECES)}
    stream = OURS.detokenizer()
    assert [stream.push([of[t]]) for t in ("<0xF0>", "<0x9F>", "<0x98>", "<0x80>")] == ["", "", "", "😀"]
    assert (stream.push([of["<0xE6>"], of["<0x97>"]]), stream.flush()) == ("", "\ufffd")
    assert OURS.decode([of["<0x0A>"]]) == "\n"


def test_control_tokens_are_found_and_dropped_and_user_defined_ones_stay():
    ids = OURS.encode("hi<turn>", add_bos=False)
    assert ids[-1] == TURN
    assert OURS.decode(ids) == "hi"
    assert USER in OURS.encode("a<user>", add_bos=False)
    assert OURS.decode([USER]) == "<user>"
    assert set(OURS.special_tokens) == {"<unk>", "<s>", "</s>", "<turn>"}


def test_bos_is_added_unless_the_files_say_no(tmp_path):
    assert in_folder(tmp_path / "a").encode("a")[0] == BOS
    assert in_folder(tmp_path / "b", add_bos_token=False).encode("a")[0] != BOS
    assert in_gguf(tmp_path / "a.gguf").encode("a")[0] == BOS
    assert in_gguf(tmp_path / "b.gguf", add_bos_token=False).encode("a")[0] != BOS
    assert in_folder(tmp_path / "c").eos_ids == in_gguf(tmp_path / "c.gguf").eos_ids == (EOS,)


@pytest.mark.parametrize("spelled", ["", "<turn>"])
def test_only_the_first_stretch_gets_a_space_where_the_files_say_so(tmp_path, spelled):
    template = "{{ messages[0]['content'] }}<turn>keeps<turn>every"
    every = in_folder(tmp_path / "a", chat_template=template)
    first = in_folder(tmp_path / "b", chat_template=template, legacy=False)
    chat = [{"role": "user", "content": f"The {spelled}"}]
    assert every.decode(every.chat(chat)) == f"The {spelled} keeps every"
    assert first.decode(first.chat(chat)) == f"The {spelled}keepsevery"
    never = in_gguf(tmp_path / "m.gguf", add_space_prefix=False)
    assert never.decode(never.encode("keeps")) == "keeps"
    assert never.decode(never.encode(" keeps")) == " keeps"


def test_tokens_beyond_the_model_are_added_in_their_places(tmp_path):
    V = len(PIECES)
    tokenizer = in_folder(
        tmp_path / "a",
        added={"<pad>": V, "<think>": V + 1},
        added_tokens_decoder={
            str(V): {"content": "<pad>", "special": True},
            str(V + 2): {"content": "<end>", "special": True},
        },
        eos_token="<end>",
    )
    assert tokenizer.vocab_size == V + 3
    assert tokenizer.eos_ids == (V + 2, EOS)
    assert tokenizer.encode("<think><pad>", add_bos=False) == [V + 1, V]
    assert tokenizer.decode([V + 1, V]) == "<think>"
    with pytest.raises(CheckpointError, match=f"added token '<pad>' has id {V + 1}, but is {V}"):
        in_folder(tmp_path / "b", added={"<pad>": V + 1})
    with pytest.raises(CheckpointError, match="added tokens that cannot be read"):
        in_folder(tmp_path / "c", added_tokens_decoder={str(V): "<pad>"})


def message(*fields: tuple[int, bytes | int | float]) -> bytes:
    """A protobuf message of small fields."""
    raw = b""
    for number, value in fields:
        if isinstance(value, bytes):
            raw += bytes([number << 3 & 0x7F | 2 | (0x80 if number > 15 else 0)])
            raw += bytes([number >> 4]) * (number > 15) + bytes([len(value)]) + value
        elif isinstance(value, float):
            raw += bytes([number << 3 | 5]) + struct.pack("<f", value)
        else:
            raw += bytes([number << 3 & 0x7F | (0x80 if number > 15 else 0)])
            raw += bytes([number >> 4]) * (number > 15) + bytes([value])
    return raw


def model(trainer: bytes, normalizer: bytes) -> bytes:
    piece = message((1, b"a"), (2, -1.5), (3, 1))
    return message((1, message((1, b"<unk>"), (3, 2))), (1, piece), (2, trainer), (3, normalizer))


def test_a_model_of_a_few_fields_is_read(tmp_path):
    (tmp_path / "m").write_bytes(model(message((3, 2), (41, 5)), message((3, 0), (4, 0))))
    read = read_sentencepiece(tmp_path / "m")
    assert read.pieces == [Piece("<unk>", 0.0, PieceKind.UNKNOWN), Piece("a", -1.5, PieceKind.NORMAL)]
    assert (read.bos_id, read.eos_id, read.adds_prefix) == (5, 2, False)


@pytest.mark.parametrize(
    ("trainer", "normalizer", "complaint"),
    [
        (b"", message((4, 0)), "a unigram model"),
        (message((3, 4)), message((4, 0)), "a char model"),
        (message((3, 2)), b"", "removal of extra spaces"),
        (message((3, 2)), message((2, b"map"), (4, 0)), "normalisation of letters"),
        (message((3, 2)), message((4, 0), (5, 0)), "unescaped spaces"),
        (message((3, 2), (24, 1)), message((4, 0)), "spaces after words"),
    ],
)
def test_models_that_change_the_text_are_refused_by_name(tmp_path, trainer, normalizer, complaint):
    (tmp_path / "tokenizer.model").write_bytes(model(trainer, normalizer))
    with pytest.raises(TokenizerError, match=f"tokenizer.model: .*{complaint}"):
        read_sentencepiece(tmp_path / "tokenizer.model")


def test_damaged_models_end_in_our_error(tmp_path):
    raw, path = MODEL.read_bytes(), tmp_path / "tokenizer.model"
    with pytest.raises(TokenizerError, match=r"tokenizer.model: No such file"):
        read_sentencepiece(path)
    # Llama 3's files of this name are tiktoken's
    for content in (
        b"",
        b"IQ== 0\nIg== 1\n",
        b"\xff" * 20,
        b"\x0a",
        raw[: len(raw) // 2],
        raw[:-1],
        b"\x0a\x01\x0b",
    ):
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=r"tokenizer.model: "):
            read_sentencepiece(path)


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([("a", 1), ("a", 1)], "'a' stands twice"),
        ([("a", 1)], "0 unknown tokens"),
        ([("<unk>", 2), ("<0x00>", 6)], "1 byte tokens"),
    ],
)
def test_a_broken_vocabulary_is_refused(pieces, complaint):
    with pytest.raises(ValueError, match=complaint):
        sentencepiece_bpe([Piece(text, 0.0, PieceKind(kind)) for text, kind in pieces], prefix="every")


def test_gguf_fields_that_disagree_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"m.gguf: .*remove_extra_whitespaces"):
        in_gguf(tmp_path / "m.gguf", remove_extra_whitespaces=True)
    with pytest.raises(CheckpointError, match=r"m.gguf: .*7 is not a valid PieceKind"):
        in_gguf(tmp_path / "m.gguf", token_type=[7] * len(PIECES))
    with pytest.raises(
        CheckpointError, match=f"m.gguf: {len(PIECES)} tokens, but 1 of tokenizer.ggml.scores"
    ):
        in_gguf(tmp_path / "m.gguf", scores=[0.0])

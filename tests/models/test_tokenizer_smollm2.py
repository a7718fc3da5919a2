"""SmolLM2's tokenizer, read from its GGUF, against ids that transformers made (golden/make_golden.py)."""

import pytest
from golden.values import smollm2, smollm2_gguf

from models.checkpoint.gguf_file import GGUFFile
from models.checkpoint.gguf_tokenizer import read_tokenizer
from models.tokenizer import Tokenizer

GOLDEN = smollm2()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return read_tokenizer(GGUFFile(smollm2_gguf()))


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"])[:30])
def test_text_encodes_as_in_transformers_and_decodes_to_itself(tokenizer, case):
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["chats"])
def test_chats_render_and_encode_as_in_transformers(tokenizer, case):
    messages, generation = case["messages"], case["add_generation_prompt"]
    assert tokenizer.render_chat(messages, generation) == case["text"]
    assert tokenizer.chat(messages, generation) == case["ids"]


def test_special_ids(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.settings.add_bos) == (1, (2,), False)
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.special_tokens["<|im_end|>"] == 2
    assert len(tokenizer.special_tokens) == 17

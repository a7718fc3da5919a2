"""Makes the golden values of this folder with Hugging Face transformers, not needed otherwise.

    python make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf      (torch 2.13, transformers 5.24, gguf 0.19)

smollm2.json: the GGUF's weights dequantised to float32 and computed in float32 (and the greedy answer in
bfloat16 too). The reference tokenizer is the one transformers reads from the GGUF, with the pre-tokenizer
that SmolLM2's own tokenizer.json has (single digits, then GPT-2's rule): transformers ignores
`tokenizer.ggml.pre`.
tiny_llama/: a random model (3 queries per KV head, head_dim != D / N, llama3 RoPE
scaling, own lm_head, two end tokens) as a Hugging Face folder in bfloat16, and its float32 logits far beyond
the original context.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little girl who lived in a village near the forest.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at 100 degrees Celsius. At what temperature does it freeze? Answer:",
    "日本の首都は",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
]
TEXTS = [
    "Hello, world!",
    "",
    " ",
    "  two  spaces   three    four",
    "tab\there\n\nnew lines\r\n \n end ",
    "emoji 😀👍🏽 family 👨‍👩‍👧‍👦 flag 🇫🇷",
    "日本語と中文와 한국어",
    "naïve café Ünïcödé ñ ß Ω",
    "3.14159 and 2024-01-22, 1000000 x 007",
    "½ ٣ Ⅷ 一",
    "I'm you're it's they'll we've I'd don't DON'T",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|> <|endoftext|>x<|im_end|>y<|unknown|>",
    "x = {'a': [1, 2], \"b\": None}  # ok?\n\tif x:\n        pass",
    "a\u0301 e\u200d\u00a0nbsp\u3000wide \ufeffbom",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!????",
    "\x00\x01\x7f control",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi 😀"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "  and\n2+2? "},
    ],
]
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}


def smollm2(path: Path) -> LlamaForCausalLM:
    reader = gguf.GGUFReader(path)
    meta = lambda name: reader.fields[f"llama.{name}"].contents()  # noqa: E731
    heads, kv_heads = meta("attention.head_count"), meta("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=meta("vocab_size"),
        hidden_size=meta("embedding_length"),
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta("context_length"),
        rms_norm_eps=1e-5,
        rope_theta=meta("rope.freq_base"),
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        count = {"attn_q": heads, "attn_k": kv_heads}.get(parts[-2])
        if count:  # llama.cpp interleaves the two halves of every head
            weight = weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        name = TOP.get(parts[0]) or f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
        state[name] = torch.from_numpy(np.array(weight))
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or missing not in ([], ["lm_head.weight"]):
        raise SystemExit(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def reference_tokenizer(path: Path):
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def rounded(values) -> list[float]:
    return [round(float(v), 6) for v in values]


@torch.no_grad()
def logits_of(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def greedy(model, ids: list[int], steps: int, end: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < steps and (not answer or answer[-1] != end):
        answer.append(int(logits_of(model, ids + answer)[-1].argmax()))
    return answer


def make_smollm2(path: Path) -> None:
    model, tokenizer = smollm2(path), reference_tokenizer(path)
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        logits = logits_of(model, ids)
        scored = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
        top = logits[-1].topk(16)
        cases.append(
            {
                "prompt": prompt,
                "ids": ids,
                "logprobs": rounded(scored),
                "top_ids": top.indices.tolist(),
                "top_logits": rounded(top.values),
            }
        )
    france, end = cases[0]["ids"], tokenizer.eos_token_id
    answers = {"float32": greedy(model, france, 24, end)}
    answers["bfloat16"] = greedy(model.to(torch.bfloat16), france, 24, end)
    golden = {
        "cases": cases,
        "greedy_prompt": PROMPTS[0],
        "greedy": {k: {"ids": v, "text": tokenizer.decode(v)} for k, v in answers.items()},
        "texts": [{"text": t, "ids": tokenizer(t, add_special_tokens=False).input_ids} for t in TEXTS],
        "chats": [
            {
                "messages": chat,
                "add_generation_prompt": generation,
                "text": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation),
                "ids": tokenizer.apply_chat_template(
                    chat, add_generation_prompt=generation, return_dict=False
                ),
            }
            for chat in CHATS
            for generation in (True, False)
        ],
    }
    (HERE / "smollm2.json").write_text(json.dumps(golden, ensure_ascii=True, indent=None) + "\n")
    print(json.dumps(golden["greedy"], indent=1))


def make_tiny_llama() -> None:
    folder = HERE / "tiny_llama"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    scaling = dict(written.pop("rope_parameters"))  # as every published checkpoint has it
    written |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    ids = np.random.default_rng(7).integers(3, 320, 400).tolist()
    # Loaded anew: casting a model to bfloat16 has rounded its RoPE frequencies as well.
    logits = logits_of(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids)
    rows = {str(i): rounded(logits[i]) for i in (0, 10, 100, 399)}
    (folder / "logits.json").write_text(json.dumps({"ids": ids, "logits": rows}) + "\n")

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|turn|>"]
    backend.train_from_iterator(
        [*PROMPTS, *TEXTS],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|turn|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": template},
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    torch.set_num_threads(2)
    make_tiny_llama()
    make_smollm2(Path(sys.argv[1]))

"""GGUF files, written as llama.cpp's converter does: equal to the same model from Hugging Face files."""

from dataclasses import replace

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from golden.folders import gguf_file, hf_folder, random_tensors, tiny_config, tiny_tensors

from models.checkpoint import CheckpointError, load_model, load_text, weights_fingerprint
from models.checkpoint.gguf_file import GGUFFile
from models.config import LlamaConfig, RopeScaling
from models.rope import inverse_frequencies

WIDE = LlamaConfig(
    vocab_size=64,
    d_model=64,
    d_ff=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position=256,
    block_tokens=32,
    layers_per_group=1,
    tie_embeddings=True,
)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_of_q_and_k_are_put_back(tmp_path, kv_heads):
    cfg = replace(WIDE, num_kv_heads=kv_heads, tie_embeddings=False)
    tensors = random_tensors(cfg)
    params = load_model(gguf_file(tmp_path / "m.gguf", cfg, tensors), dtype="float32").params
    q, k, v = (tensors[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv")
    np.testing.assert_array_equal(params["layers"][0]["qkv"], np.concatenate([q, k, v]))


@pytest.mark.parametrize("kind", [QType.F32, QType.F16, QType.BF16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_is_the_same_model_as_its_hugging_face_folder(tmp_path, kind, dtype):
    stored = {QType.F32: np.float32, QType.F16: np.float16, QType.BF16: ml_dtypes.bfloat16}[kind]
    tensors = tiny_tensors()
    tensors = {n: t.astype(stored).astype(np.float32) for n, t in tensors.items()}
    cfg = replace(tiny_config(), rope_scaling=None)
    ours = load_model(gguf_file(tmp_path / "m.gguf", cfg, tensors, kind), dtype=dtype)
    theirs = load_model(hf_folder(tmp_path / "hf", tensors, rope_scaling=None), dtype=dtype)
    assert ours.cfg == theirs.cfg
    assert ours.fingerprint == theirs.fingerprint


@pytest.mark.parametrize(
    ("kind", "error"),
    [(QType.Q8_0, 0.01), (QType.Q4_0, 0.15), (QType.Q4_1, 0.1), (QType.Q5_0, 0.1), (QType.Q5_1, 0.1)],
)
def test_quantised_rows_come_back_close(tmp_path, kind, error, monkeypatch):
    monkeypatch.setattr("models.checkpoint.tensor._CHUNK_NBYTES", 1000)  # several chunks a tensor
    tensors = random_tensors(WIDE)
    params = load_model(gguf_file(tmp_path / "m.gguf", WIDE, tensors, kind), dtype="float32").params
    plain = load_model(gguf_file(tmp_path / "p.gguf", WIDE, tensors), dtype="float32").params
    for have, want in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
        assert np.abs(have - want).max() < error
    assert np.abs(params["embed"] - plain["embed"]).max() > 0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_the_divisors(tmp_path, factor):
    scaling = RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    cfg = replace(WIDE, head_dim=64, rope_theta=500_000.0)
    plain = inverse_frequencies(cfg)
    divisors = plain / inverse_frequencies(replace(cfg, rope_scaling=scaling))
    path = gguf_file(tmp_path / "m.gguf", cfg, random_tensors(cfg), rope_freqs=divisors)
    assert load_model(path).cfg == replace(cfg, rope_scaling=scaling)
    path = gguf_file(tmp_path / "n.gguf", cfg, random_tensors(cfg), rope_freqs=np.linspace(1, factor, 32))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is not llama3"):
        load_model(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling type 'yarn'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "field tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.tokens": [1] * 64}, "tokens is not a list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "64 tokens, but 1 of tokenizer.ggml.token_type"),
        ({"llama.attention.sliding_window": 255}, "sliding_window is 255; only full attention"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.eos_token_id": 64}, "EOS id 64"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id is '<s>', not int"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "'a' stands twice"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.vocab_size": 65}, r"token_embd.weight has shape \(64, 64\), the config asks for \(65, 64\)"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
    ],
)
def test_metadata_we_cannot_use_is_refused(tmp_path, fields, message):
    path = gguf_file(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), fields=fields)
    with pytest.raises(CheckpointError, match=f"m.gguf: .*{message}"):
        load_model(path)


def test_linear_scaling_and_several_end_tokens(tmp_path):
    fields = {
        "llama.rope.scaling.type": "linear",
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"field llama.rope.scaling.factor is missing"):
        load_model(gguf_file(path, WIDE, random_tensors(WIDE), fields=fields))
    tokenizer = load_model(
        gguf_file(path, WIDE, random_tensors(WIDE), fields={**list_but_first(fields)})
    ).tokenizer
    assert tokenizer is not None
    assert (tokenizer.eos_ids, tokenizer.settings.add_bos) == ((1, 7), True)


def test_llama_3_ends_with_any_of_its_end_tokens(tmp_path):
    tokens = [f"t{i}" for i in range(64)]
    tokens[3:9] = ["<|end_of_text|>", "<|eot_id|>", "t", "<|eom_id|>", "0", "<|end_of_text|>x"]
    fields = {"tokenizer.ggml.tokens": [*tokens[:62], "a", "t0"], "tokenizer.ggml.eos_token_id": 4}
    kinds = [3 if i in (3, 4) else 1 for i in range(64)]  # 6 is a word that looks like an end
    fields |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 9}
    fields["tokenizer.ggml.tokens"][0] = "first"
    tokenizer = load_text(gguf_file(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), fields=fields))[1]
    assert tokenizer is not None
    assert tokenizer.eos_ids == (4, 3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"llama.rope.scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama.rope.scale_linear": 1.0}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 0.0}, None),
        ({"llama.attention.sliding_window": 256}, None),
    ],
)
def test_fields_of_older_files_are_used(tmp_path, fields, expected):
    path = gguf_file(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), fields=fields)
    assert load_model(path).cfg == replace(WIDE, rope_scaling=expected)


def test_two_kinds_of_scaling_in_one_file_are_refused(tmp_path):
    fields = {"llama.rope.scale_linear": 4.0}
    path = gguf_file(tmp_path / "m.gguf", WIDE, random_tensors(WIDE), fields=fields, rope_freqs=np.ones(8))
    with pytest.raises(
        CheckpointError, match=r"m.gguf: both linear RoPE scaling and tensor rope_freqs.weight"
    ):
        load_model(path)


def list_but_first(fields: dict) -> dict:
    return dict(list(fields.items())[1:])


def test_missing_and_extra_tensors_are_named(tmp_path):
    tensors = random_tensors(WIDE)
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"m.gguf: tensor output_norm.weight \(64,\) is missing"):
        load_model(gguf_file(tmp_path / "m.gguf", WIDE, tensors))
    tensors |= {"model.norm.weight": norm, "model.layers.1.mlp.up_proj.weight": np.ones((96, 64), np.float32)}
    with pytest.raises(CheckpointError, match=r"m.gguf: 1 tensors .* blk.1.ffn_up.weight"):
        load_model(gguf_file(tmp_path / "m.gguf", WIDE, tensors))


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path):
    raw = gguf_file(tmp_path / "m.gguf", WIDE, random_tensors(WIDE)).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 64), *range(64, len(raw) - 1, 997), len(raw) - 64]:
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"cut.gguf: "):
            load_model(path)
    path.write_bytes(raw[:-300])
    with pytest.raises(CheckpointError, match=r"truncated: tensor \S+ ends at"):
        load_model(path)


def test_damaged_headers_end_in_our_error(tmp_path):
    raw = bytearray(gguf_file(tmp_path / "m.gguf", WIDE, random_tensors(WIDE)).read_bytes())
    path, rng = tmp_path / "bad.gguf", np.random.default_rng(0)
    refused = 0
    for position in rng.integers(0, 1500, 200).tolist():
        broken = bytearray(raw)
        broken[position] = int(rng.integers(128, 256))
        path.write_bytes(broken)
        try:
            load_model(path)
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_big_endian_and_other_versions_are_refused(tmp_path):
    raw = gguf_file(tmp_path / "m.gguf", WIDE, random_tensors(WIDE)).read_bytes()
    (tmp_path / "v.gguf").write_bytes(raw[:4] + b"\x00\x00\x00\x03" + raw[8:])
    with pytest.raises(CheckpointError, match="GGUF version 50331648"):
        GGUFFile(tmp_path / "v.gguf")


def test_fingerprints_of_quantised_and_plain_differ(tmp_path):
    tensors = random_tensors(WIDE)
    a = load_model(gguf_file(tmp_path / "a.gguf", WIDE, tensors, gguf.GGMLQuantizationType.Q8_0))
    b = load_model(gguf_file(tmp_path / "b.gguf", WIDE, tensors))
    assert weights_fingerprint(a.cfg, a.params) != b.fingerprint

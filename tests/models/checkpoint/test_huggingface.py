"""Hugging Face folders: equal logits to transformers, exact bytes, and an error that names what is wrong."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden.folders import hf_folder, tiny_config, tiny_tensors
from golden.values import TINY_LLAMA, tiny_llama_logits
from safetensors.numpy import save_file

from models.checkpoint import CheckpointError, load_model, load_text
from models.checkpoint.huggingface_config import read_config
from models.config import RopeScaling
from models.llama import DTYPES, dense_logits

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def same(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in leaves)


def test_logits_are_those_of_transformers_far_beyond_the_original_context():
    golden = tiny_llama_logits()
    model = load_model(TINY_LLAMA, dtype="float32")
    logits_of, ids = jax.jit(dense_logits, static_argnums=0), jnp.asarray(golden["ids"])
    logits = np.asarray(logits_of(model.cfg, model.params, ids))
    for position, expected in golden["logits"].items():
        np.testing.assert_allclose(logits[int(position)], expected, atol=1e-3)
    unscaled = logits_of(replace(model.cfg, rope_scaling=None), model.params, ids)
    assert np.abs(np.asarray(unscaled)[399] - golden["logits"]["399"]).max() > 1e-2


def test_config_and_tokenizer_come_with_the_weights():
    model = load_model(TINY_LLAMA)
    assert model.dtype == "bfloat16"
    assert model.cfg.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    assert (model.cfg.num_heads, model.cfg.num_kv_heads, model.cfg.head_dim) == (6, 2, 8)
    assert model.tokenizer is not None
    assert model.tokenizer.settings.add_bos  # by the post-processor of tokenizer.json
    assert model.tokenizer.chat([{"role": "user", "content": "hi"}]).count(0) == 1


def test_bfloat16_is_bit_exact_and_fused_in_order():
    tensors, params = tiny_tensors("bfloat16"), load_model(TINY_LLAMA).params
    layer = params["layers"][1]
    parts = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert layer["qkv"].tobytes() == np.concatenate(parts).tobytes()
    parts = [tensors[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert layer["gate_up"].tobytes() == np.concatenate(parts).tobytes()
    assert layer["down"].tobytes() == tensors[DOWN].tobytes()
    assert params["lm_head"].tobytes() == tensors[HEAD].tobytes()


@pytest.mark.parametrize("stored", ["float64", "float32", "float16", BFLOAT16, "mixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stored_dtype_loads_as_every_target(tmp_path, stored, dtype):
    tensors = tiny_tensors()
    kinds = ["float32", "float16", BFLOAT16] if stored == "mixed" else [stored]
    tensors = {name: t.astype(kinds[i % len(kinds)]) for i, (name, t) in enumerate(tensors.items())}
    params = load_model(hf_folder(tmp_path, tensors), dtype=dtype).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {DTYPES[dtype]}
    expected = tensors[DOWN].astype(np.float32).astype(DTYPES[dtype])
    np.testing.assert_array_equal(params["layers"][1]["down"], expected)


def test_shards_are_one_model(tmp_path):
    tensors = tiny_tensors("bfloat16")
    folder = sharded(tmp_path, tensors)
    assert same(load_model(folder).params, load_model(TINY_LLAMA).params)


def sharded(path, tensors):
    """`tensors` in two shards and their index."""
    folder = hf_folder(path)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "place", ["gone", "../model-1-of-2.safetensors", "truncated", "elsewhere", "nowhere"]
)
def test_a_broken_shard_is_named(tmp_path, place):
    folder = sharded(tmp_path, tiny_tensors())
    shard, index = folder / "model-1-of-2.safetensors", folder / "model.safetensors.index.json"
    if place == "gone":
        shard.unlink()
        message = "model-1-of-2.safetensors, which is not there"
    elif place == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
        message = r"model-1-of-2.safetensors: truncated: tensor \S+ ends at"
    elif place in ("elsewhere", "nowhere"):
        fields = json.loads(index.read_text())
        name = {"elsewhere": EMBED, "nowhere": "model.layers.9.mlp.up_proj.weight"}[place]
        fields["weight_map"][name] = "model-1-of-2.safetensors"
        index.write_text(json.dumps(fields))
        message = f"model-1-of-2.safetensors: tensor {name} is not there"
    else:
        index.write_text(index.read_text().replace("model-1-of-2.safetensors", place))
        message = "not a file of this folder"
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tensors = tiny_tensors()
    folder = sharded(tmp_path, tensors)
    save_file(tensors, folder / "model-2-of-2.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor \S+ is in .*model-1-of-2.safetensors as well"):
        load_model(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_lm_head_tied_or_stored(tmp_path, tied, stored):
    tensors = tiny_tensors()
    if not stored:
        del tensors[HEAD]
    folder = hf_folder(tmp_path, tensors, tie_word_embeddings=tied)
    if not tied and not stored:
        with pytest.raises(CheckpointError, match=f"tensor {HEAD} \\(320, 24\\) is missing"):
            load_model(folder)
        return
    params = load_model(folder).params
    assert ("lm_head" in params) == (not tied)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    tensors = tiny_tensors()
    down = tensors.pop(DOWN)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*tensor {DOWN} \\(24, 40\\) is missing"):
        load_model(hf_folder(tmp_path / "a", tensors))
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*{DOWN} has shape \\(40, 24\\)"):
        load_model(hf_folder(tmp_path / "b", tensors | {DOWN: np.ascontiguousarray(down.T)}))
    with pytest.raises(CheckpointError, match=r"model.safetensors: 1 tensors .* q_norm.weight"):
        load_model(hf_folder(tmp_path / "c", tensors | {DOWN: down, "q_norm.weight": down}))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load_model(hf_folder(tmp_path / "d", tensors | {DOWN: down} | frequencies))


def test_an_integer_tensor_is_refused_by_name(tmp_path):
    tensors = tiny_tensors() | {DOWN: np.ones((24, 40), np.int8)}
    with pytest.raises(CheckpointError, match=f"tensor {DOWN} is I8; supported"):
        load_model(hf_folder(tmp_path, tensors))


@pytest.mark.parametrize("header", ["[]", "7", "{", "null"])
def test_a_header_that_is_no_table_is_refused(tmp_path, header):
    folder = hf_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(CheckpointError, match=r"model.safetensors: broken header"):
        load_model(folder)


@pytest.mark.parametrize("cut", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path, cut):
    folder = hf_folder(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated"):
        load_model(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1]},
        [],
    ],
)
def test_a_broken_header_entry_names_its_tensor(tmp_path, entry):
    header = json.dumps({"__metadata__": {}, "w": entry}).encode()
    folder = hf_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor w "):
        load_model(folder)


LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "default"}, None),
        ({"kind": "linear", "factor": 2}, RopeScaling("linear", 2.0)),
        ({"kind": "llama3", "factor": 32.0, **LLAMA3}, RopeScaling("llama3", 32.0, 1.0, 4.0, 64)),
        ({"kind": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"kind": "yarn"}, "'yarn'"),
        ({"kind": "llama3", "factor": 8.0}, "without 'low_freq_factor'"),
        ({"kind": "linear", "factor": 0.5}, "factor must be at least 1"),
        ({"kind": "linear", "factor": float("inf")}, "factor must be at least 1"),
        ({"kind": "linear", "factor": "two"}, "could not convert"),
        ({"kind": ["linear"]}, "unhashable|RoPE"),
    ],
)
def test_rope_scaling(key, fields, expected):
    config = json.loads((TINY_LLAMA / "config.json").read_text())
    config["rope_scaling"] = {key if k == "kind" else k: v for k, v in fields.items()}
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            read_config(config, where="config.json")
    else:
        assert read_config(config, where="config.json").rope_scaling == expected


def test_rope_parameters_of_newer_files_are_read():
    config = json.loads((TINY_LLAMA / "config.json").read_text())
    scaling = config.pop("rope_scaling")
    config["rope_parameters"] = scaling | {"rope_theta": config.pop("rope_theta")}
    assert read_config(config, where="config.json") == tiny_config()
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500_000.0}
    cfg = read_config(config, where="config.json")
    assert (cfg.rope_scaling, cfg.rope_theta) == (None, 500_000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false"),
        ({"model_type": "mistral", "sliding_window": 511}, "sliding_window is 511; only full attention"),
        ({"model_type": "mistral", "max_position_embeddings": 5000}, "sliding_window is 4096"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected a JSON object"),
        ({"rope_scaling": {"factor": 8.0}}, "a factor but no rope_type"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "both types 'linear' and 'yarn'"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": None},
            "partial_rotary_factor is 0.5",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
    ],
)
def test_a_config_we_cannot_run_is_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        load_model(hf_folder(tmp_path, **changes))


def test_mistral_is_the_same_graph_without_a_window():
    config = json.loads((TINY_LLAMA / "config.json").read_text()) | {"model_type": "mistral"}
    for window in (None, 512, 4096):
        assert read_config(config | {"sliding_window": window}, where="config.json") == tiny_config()
    assert read_config(config, where="config.json") == tiny_config()  # 4096 is wider than the model's 512
    del config["num_key_value_heads"]
    config["num_attention_heads"] = 16
    assert read_config(config, where="config.json").num_kv_heads == 8


def test_biases_must_be_where_the_config_says(tmp_path):
    bias = "model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(CheckpointError, match=f"tensor {bias} \\(24,\\) is missing"):
        load_model(hf_folder(tmp_path / "a", attention_bias=True))
    with pytest.raises(CheckpointError, match=r"1 tensors .*layers.1.mlp.up_proj.bias"):
        load_model(
            hf_folder(tmp_path / "b", tiny_tensors() | {"model.layers.1.mlp.up_proj.bias": np.ones(40)})
        )


def test_absent_config_fields_have_their_defaults():
    config = json.loads((TINY_LLAMA / "config.json").read_text())
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "tie_word_embeddings"):
        del config[name]
    cfg = read_config(config, where="config.json")
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rope_theta, cfg.tie_embeddings) == (6, 4, 10_000.0, False)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(None, None, (1,)), (3, None, (1, 3)), (1, [1, 2], (1, 2)), ([4, 3], 1, (1, 4, 3)), ([], [], (1,))],
)
def test_end_tokens_are_the_union_of_all_files(tmp_path, config_eos, generation_eos, expected):
    folder = hf_folder(tmp_path, eos_token_id=config_eos)
    generation = folder / "generation_config.json"
    if generation_eos is None:
        generation.unlink()
    else:
        generation.write_text(json.dumps({"eos_token_id": generation_eos}))
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.eos_ids == expected


@pytest.mark.parametrize("bad", [320, -1, [1, 4000], "two", True])
def test_an_end_token_outside_the_vocabulary_is_a_load_error(tmp_path, bad):
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*(EOS id|eos_token_id)"):
        load_model(hf_folder(tmp_path, eos_token_id=bad))


def test_tokenizer_settings_come_from_the_files_beside_it(tmp_path):
    folder = hf_folder(tmp_path)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about |= {"add_bos_token": False, "chat_template": [{"name": "default", "template": "list"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    assert (tokenizer.settings.add_bos, tokenizer.settings.chat_template) == (False, "list")
    (folder / "chat_template.jinja").write_text("file")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.settings.chat_template == "file"
    about["eos_token"] = "<|nowhere|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: eos_token '<\|nowhere\|>'"):
        load_model(folder)
    (folder / "tokenizer.json").unlink()
    assert load_model(folder).tokenizer is None


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tensors = tiny_tensors()
    tensors |= {name: np.ascontiguousarray(tensors[name][:300]) for name in (HEAD, EMBED)}
    with pytest.raises(CheckpointError, match="tokenizer has 320 tokens, the model 300"):
        load_model(hf_folder(tmp_path, tensors, vocab_size=300))


JUNK = (None, True, 0, -1, 1.5, float("inf"), float("nan"), "x", [], {}, [1], [None], {"a": 1}, 2**70)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_junk_in_any_field_is_harmless_or_our_error(tmp_path, name):
    folder = hf_folder(tmp_path)
    whole = json.loads((folder / name).read_text())
    paths = [(field,) for field in [*whole, "sliding_window", "chat_template", "added_tokens_decoder"]]
    paths += [("rope_scaling", field) for field in whole.get("rope_scaling", {})]
    refused = 0
    for *parents, field in paths:
        for value in JUNK:
            fields = json.loads(json.dumps(whole))
            inner = fields
            for parent in parents:
                inner = inner[parent]
            inner[field] = value
            (folder / name).write_text(json.dumps(fields))
            try:
                load_text(folder)
            except CheckpointError as error:
                refused += str(tmp_path) in str(error)
    assert refused >= 10


def test_what_is_no_model_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        load_model(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="neither"):
        load_model(tmp_path)
    hf_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: not JSON"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="float8"):
        load_model(tmp_path, dtype="float8")

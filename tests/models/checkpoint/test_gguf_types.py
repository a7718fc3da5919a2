"""Quantised GGUF tensors, packed by hand, against a scalar decoder; other types are refused by name."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from golden.scalar_blocks import FORMATS

from models.checkpoint import CheckpointError
from models.checkpoint.gguf_file import DECODED, GGUFFile

ROWS, BLOCKS = 5, 3


def file_with(path: Path, raw: np.ndarray, kind: QType) -> GGUFFile:
    """A GGUF file with one tensor `w` of these bytes `[rows, bytes of a row]`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def packed(name: str) -> np.ndarray:
    """Rows of blocks in which every bit but those of the scales is random: every quant and sub-scale occurs."""
    _, nbytes, scales_at = FORMATS[name]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (ROWS, BLOCKS, nbytes)).astype(np.uint8)
    for block in raw.reshape(-1, nbytes):
        for at in scales_at:
            block[at : at + 2] = list(struct.pack("<e", rng.uniform(-2, 2)))
    return raw.reshape(ROWS, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_bit_of_a_block_means_what_the_format_says(tmp_path, name, monkeypatch):
    monkeypatch.setattr("models.checkpoint.tensor._CHUNK_NBYTES", 2 * 4 * BLOCKS * 256)  # some rows at a time
    decode, nbytes, _ = FORMATS[name]
    raw = packed(name)
    file = file_with(tmp_path / "m.gguf", raw, QType[name])
    values = np.concatenate([rows for _, rows in file.rows(file.tensors["w"])])
    expected = [
        [x for i in range(BLOCKS) for x in decode(row[i * nbytes : (i + 1) * nbytes].tobytes())]
        for row in raw
    ]
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


def test_the_scalar_decoder_knows_every_quantised_type_we_decode():
    assert {kind.name for kind in DECODED} == {"F32", "F16", "BF16", *FORMATS}


@pytest.mark.parametrize("kind", [QType.Q2_K, QType.Q3_K, QType.IQ4_NL, QType.TQ1_0, QType.MXFP4])
def test_types_we_do_not_decode_are_refused_by_name(tmp_path, kind):
    block_values, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((1, block_nbytes * 256 // block_values), np.uint8)
    file = file_with(tmp_path / "m.gguf", raw, kind)
    with pytest.raises(
        CheckpointError, match=f"m.gguf: tensor w is {kind.name}; supported: F32, F16, .*Q6_K"
    ):
        list(file.rows(file.tensors["w"]))


@pytest.mark.parametrize("number", [4, 5, 99])
def test_a_type_that_nobody_knows_is_refused_by_its_number(tmp_path, number):
    file_with(tmp_path / "m.gguf", np.zeros((1, 18), np.uint8), QType.Q4_0)
    raw = (tmp_path / "m.gguf").read_bytes()
    head = b"w" + struct.pack("<IQQ", 2, 32, 1)
    assert raw.count(head + struct.pack("<I", 2)) == 1
    (tmp_path / "m.gguf").write_bytes(
        raw.replace(head + struct.pack("<I", 2), head + struct.pack("<I", number))
    )
    with pytest.raises(CheckpointError, match=f"m.gguf: tensor w is of type {number}: unknown"):
        GGUFFile(tmp_path / "m.gguf")

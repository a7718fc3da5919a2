"""Both engines on the tiny model, small enough to compile in seconds; one pair per dtype for all tests."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest

from models import llama
from models.config import LlamaConfig, preset
from models.platform import CPU
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine
from mooncake_jax.engine.oracle import Monolith

SMALL = dataclasses.replace(
    CPU,
    tile_tokens=32,
    tile_tokens_by_columns=16,
    attention_rows=4,
    prefill_key_tokens=(32, 32),
    tail_key_tokens=32,
    decode_key_tokens=((32, 32),),
)
MAX_TOKENS = 112


class Pair(NamedTuple):
    cfg: LlamaConfig
    dtype: str
    params: llama.Params
    prefill: JaxPrefillEngine
    decode: JaxDecodeEngine
    memory: np.ndarray  # of a store, attached to `prefill`

    def dense(self, tokens) -> np.ndarray:
        """Reference log probabilities `[S, V]` of a whole sequence."""
        padded = np.zeros(MAX_TOKENS, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(_dense(self.cfg, self.params, padded))[: len(tokens)]


@jax.jit(static_argnums=0)
def _dense(cfg, params, tokens):
    return jax.nn.log_softmax(llama.dense_logits(cfg, params, tokens))


def aligned_zeros(slots: int, nbytes: int) -> np.ndarray:
    """uint8 `[slots, nbytes]` that begins at a page, as shared memory does."""
    raw = np.zeros(slots * nbytes + 4096, np.uint8)
    begin = -raw.ctypes.data % 4096
    return raw[begin : begin + slots * nbytes].reshape(slots, nbytes)


def build(dtype: str, params: llama.Params, decode_slots: int, num_devices: int) -> Pair:
    cfg = preset("tiny")
    how = {"dtype": dtype, "max_tokens": MAX_TOKENS, "fingerprint": b"tiny", "platform": SMALL}
    prefill = JaxPrefillEngine(cfg, params, num_slots=2, devices=jax.devices()[:num_devices], **how)
    memory = aligned_zeros(9, prefill.format.nbytes)
    prefill.attach(memory)
    decode = JaxDecodeEngine(cfg, params, num_slots=decode_slots, insert_blocks=2, **how)
    Monolith(prefill, decode).warm_up()
    return Pair(cfg, dtype, params, prefill, decode, memory)


@pytest.fixture(scope="session")
def pair() -> Pair:
    return build("float32", llama.init_params(preset("tiny"), 0, "float32"), decode_slots=3, num_devices=4)


@pytest.fixture(scope="session")
def bf16_pair() -> Pair:
    return build("bfloat16", llama.init_params(preset("tiny"), 0, "bfloat16"), decode_slots=1, num_devices=2)

"""The identity of a model's weights.

Only the weights: what else decides whether two processes may share KV blocks (block layout, KV dtype, block
size) is added to it by the serving side, which makes a block's root key of both.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from models.config import LlamaConfig
from models.llama import Params

FINGERPRINT_NBYTES = 16
# how serving cuts a model, not what it computes; and what the parameters' names say already
_LEFT_OUT = ("block_tokens", "layers_per_group", "max_position", "attention_bias", "mlp_bias")


def weights_fingerprint(cfg: LlamaConfig, params: Params) -> bytes:
    """128-bit BLAKE2b over the config and every parameter's name, dtype, shape and bytes.

    Equal in every process, for every checkpoint format and every placement. Parameters are hashed in parallel
    (about 1 GB/s a core), then their digests in the order of their names. Raises ValueError for a parameter
    of which this process holds only a part.
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="fingerprint") as pool:
        digests = pool.map(lambda item: _digest(*item), leaves)
        rows = sorted(zip((name for name, _ in leaves), digests, strict=True))
    config = {k: v for k, v in asdict(cfg).items() if k not in _LEFT_OUT}
    whole = hashlib.blake2b(digest_size=FINGERPRINT_NBYTES, person=b"mooncake-weights")
    whole.update(
        json.dumps([config, [(name, digest.hex()) for name, digest in rows]], sort_keys=True).encode()
    )
    return whole.digest()


def _digest(name: str, leaf: Any) -> bytes:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(f"{name}: this process holds only a part of it; a fingerprint needs every byte")
    array = np.ascontiguousarray(leaf)
    digest = hashlib.blake2b(f"{array.dtype.name} {array.shape} ".encode(), digest_size=32)
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()

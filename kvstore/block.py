"""KV blocks: how their bytes are laid out, and the chained keys that name them.

Axis letters are those of WORKSPACE.md: L layers, K KV heads, Z block size in tokens, H head dim.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

KEY_NBYTES = 16
LAYOUT = "LK2ZH-le-rope"
_ITEM_DTYPES = {"bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}


class BlockFormat(msgspec.Struct, frozen=True, dict=True):
    """The one byte layout of a KV block, `[L, K, 2, Z, H]`, RoPE applied, in every tier, stream and mesh.

    A layer is one contiguous range of a block, and a layer group (`layers_per_group` layers that a prefill
    step computes in one program) is one range too.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    layers_per_group: int

    def __post_init__(self) -> None:
        if self.dtype not in _ITEM_DTYPES:
            raise ValueError(f"block dtype {self.dtype!r}: expected one of {sorted(_ITEM_DTYPES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "layers_per_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"block format: {name} must be positive, got {getattr(self, name)}")
        if self.num_layers % self.layers_per_group:
            raise ValueError(f"{self.num_layers} layers do not divide into groups of {self.layers_per_group}")

    @cached_property
    def item_dtype(self) -> np.dtype:
        """NumPy dtype of the stored items; bfloat16 travels as little-endian uint16."""
        return _ITEM_DTYPES[self.dtype]

    @property
    def num_groups(self) -> int:
        return self.num_layers // self.layers_per_group

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`[L, K, 2, Z, H]`; index 0 of the third axis is K, index 1 is V."""
        return (self.num_layers, self.num_kv_heads, 2, self.block_tokens, self.head_dim)

    @property
    def group_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one layer group's range of a block: `[L of the group, K, 2, Z, H]`."""
        return (self.layers_per_group, *self.shape[1:])

    @cached_property
    def group_nbytes(self) -> int:
        return int(np.prod(self.group_shape)) * self.item_dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        return self.group_nbytes * self.num_groups

    def group_offset(self, group: int) -> int:
        """First byte of layer group `group` in a block."""
        if not 0 <= group < self.num_groups:
            raise IndexError(f"layer group {group} of {self.num_groups}")
        return group * self.group_nbytes

    def layer_range(self, layer: int) -> tuple[int, int]:
        """Where one layer is in a block: `(offset, nbytes)`."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")
        nbytes = self.nbytes // self.num_layers
        return layer * nbytes, nbytes

    def heads_ranges(self, heads: range) -> list[tuple[int, int]]:
        """Where some KV heads, such as those of one tensor-parallel shard, are: one range per layer."""
        if heads.step != 1 or not 0 <= heads.start < heads.stop <= self.num_kv_heads:
            raise IndexError(f"heads {heads} of {self.num_kv_heads}: expected some that follow each other")
        head_nbytes = self.nbytes // (self.num_layers * self.num_kv_heads)
        layers = (self.layer_range(layer)[0] for layer in range(self.num_layers))
        return [(start + heads.start * head_nbytes, len(heads) * head_nbytes) for start in layers]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one possibly in part."""
        return -(-num_tokens // self.block_tokens)


def tagged_digest(**fields: str | bytes | int) -> bytes:
    """A 128-bit digest of named fields; name and length are hashed too, so no two field sets collide by text."""
    h = hashlib.blake2b(digest_size=KEY_NBYTES, person=b"mooncake-fields")
    for name in sorted(fields):
        value = fields[name]
        raw = value if isinstance(value, bytes) else str(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), raw):
            h.update(len(part).to_bytes(8, "little"))
            h.update(part)
    return h.digest()


def pool_fingerprint(weights: bytes, blocks: BlockFormat) -> bytes:
    """Who may share KV blocks: equal weights and config (their fingerprint `weights`), layout, dtype, block size."""
    return tagged_digest(weights=weights, layout=LAYOUT, **msgspec.structs.asdict(blocks))


def root_key(fingerprint: bytes, salt: str = "") -> bytes:
    """The parent of a prompt's first block: weights, config, dtype and layout (`fingerprint`) and the tenant's salt."""
    return tagged_digest(fingerprint=fingerprint, salt=salt)


def chain_keys(root: bytes, tokens: Sequence[int] | np.ndarray, block_tokens: int) -> list[bytes]:
    """Keys of the full blocks of `tokens`: key_i = BLAKE2b-128(key_{i-1} | token ids of block i as little-endian u32).

    The last, partial block has no key. (Paper §3: prefix hash.)
    """
    if isinstance(tokens, list):
        tokens = array("I", tokens)  # three times as fast as NumPy from a list
    ids = np.ascontiguousarray(tokens, dtype="<u4")
    step = 4 * block_tokens
    raw = ids.data.cast("B") if ids.size else memoryview(b"")
    keys, parent = [], root
    for start in range(0, len(raw) - step + 1, step):
        parent = hashlib.blake2b(raw[start : start + step], digest_size=KEY_NBYTES, key=parent).digest()
        keys.append(parent)
    return keys

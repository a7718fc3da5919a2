"""A Llama-family decoder: the parameter table, and the steps that prefill and decode are made of.

A step computes one layer group, so that its KV can leave while the next group computes; groups are equal,
and one executable per shape serves them all. `embed` comes before the groups and `head` after them.
Activations, norms and softmax are float32; matrix products take the model's dtype and accumulate in
float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from models import attention, cache, rope, short, split
from models.cache import Pages
from models.config import LlamaConfig
from models.platform import Platform

Params = dict[str, Any]
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Param:
    """One parameter, declared once: its shape, the logical axis of each dimension, and its random initialisation."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    gain: float | None = None  # normal with std gain / sqrt(fan in); None: ones
    fused: int = 1  # equal matrices that stand one after the other in its rows and are used side by side
    parts: tuple[int, ...] = ()  # rows of each matrix that stands in it, where there are several

    @property
    def shared_axis(self) -> int | None:
        """The dimension of which `split.ByColumns` gives each device a share; None: every device has the whole.

        The projection out of attention is small: computing it everywhere costs less than gathering its result.
        """
        if self.axes[0] in ("heads", "mlp"):
            return 0
        return 1 if "mlp" in self.axes else None


def param_table(cfg: LlamaConfig) -> Params:
    """The pytree of `Param`s that defines what `params` is, in every checkpoint format and on every device.

    Matrices are (out, in), as Hugging Face stores them; q, k, v rows are fused in `qkv` (N·H, K·H, K·H
    rows) and gate, up in `gate_up`. `lm_head` is present only where embeddings are not tied; `NAME_bias`
    stands beside matrix NAME where the config has biases.
    """
    heads, kv_heads = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    layer = {
        "attn_norm": Param((cfg.d_model,), (None,)),
        "qkv": Param(
            (heads + 2 * kv_heads, cfg.d_model),
            ("heads", "embed"),
            gain=1.0,
            parts=(heads, kv_heads, kv_heads),
        ),
        "out": Param((cfg.d_model, heads), ("embed", "heads"), gain=1.5),
        "mlp_norm": Param((cfg.d_model,), (None,)),
        "gate_up": Param(
            (2 * cfg.d_ff, cfg.d_model), ("mlp", "embed"), gain=1.0, fused=2, parts=(cfg.d_ff, cfg.d_ff)
        ),
        "down": Param((cfg.d_model, cfg.d_ff), ("embed", "mlp"), gain=1.0),
    }
    biased = ("qkv", "out") * cfg.attention_bias + ("gate_up", "down") * cfg.mlp_bias
    layer |= {
        f"{name}_bias": replace(matrix, shape=matrix.shape[:1], axes=matrix.axes[:1], gain=3.0)
        for name, matrix in layer.items()
        if name in biased
    }
    table: Params = {
        "embed": Param((cfg.vocab_size, cfg.d_model), ("token", "embed"), gain=3.0),
        "layers": [dict(layer) for _ in range(cfg.num_layers)],
        "final_norm": Param((cfg.d_model,), (None,)),
    }
    if not cfg.tie_embeddings:
        table["lm_head"] = Param((cfg.vocab_size, cfg.d_model), ("vocab", "embed"), gain=3.0)
    return table


def abstract_params(cfg: LlamaConfig, dtype: str) -> Params:
    """`param_table` as `jax.ShapeDtypeStruct`s: what `jax.eval_shape` and ahead-of-time lowering take."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, DTYPES[dtype]), param_table(cfg))


def init_params(cfg: LlamaConfig, seed: int, dtype: str) -> Params:
    """Random NumPy parameters, the same on every machine; scaled so that one early prompt token moves the logits."""
    rng = np.random.default_rng(seed)

    def draw(param: Param) -> np.ndarray:
        if param.gain is None:
            return np.ones(param.shape, DTYPES[dtype])
        scale = np.float32(param.gain / np.sqrt(param.shape[-1]))
        return (rng.standard_normal(param.shape, np.float32) * scale).astype(DTYPES[dtype])

    return jax.tree.map(draw, param_table(cfg))


def check_params(cfg: LlamaConfig, params: Params, dtype: str) -> None:
    """Raise ValueError naming the first parameter whose place, shape or dtype is not `param_table`'s."""
    expected = dict(_named_leaves(abstract_params(cfg, dtype)))
    actual = dict(_named_leaves(params))
    if missing := sorted(expected.keys() - actual.keys()):
        raise ValueError(f"parameters missing: {', '.join(missing[:5])} ({len(missing)} in all)")
    if extra := sorted(actual.keys() - expected.keys()):
        raise ValueError(f"parameters the model does not have: {', '.join(extra[:5])} ({len(extra)} in all)")
    for name, want in expected.items():
        have = actual[name]
        if tuple(have.shape) != want.shape or have.dtype != want.dtype:
            raise ValueError(
                f"{name}: expected {want.shape} {want.dtype}, got {tuple(have.shape)} {have.dtype}"
            )


def _named_leaves(tree: Params) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def prepare(cfg: LlamaConfig, params: Params, dtype: str, platform: Platform) -> Params:
    """Host parameters → the host pytree the steps take: `embed` in storage dtype, and `lm_head` always present."""
    check_params(cfg, params, dtype)
    table = np.asarray(params["embed"]).view(platform.storage_dtype(dtype))
    return {**params, "embed": table, "lm_head": params.get("lm_head", params["embed"])}


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding `[V, D]` for `tokens` `[T]` → `[T, D]` float32. Ids must be in range (checked by
    callers)."""
    with jax.named_scope("embed"):
        return cache.from_storage(table.at[tokens].get(mode="clip")).astype(jnp.float32)


def prefill_group(
    cfg: LlamaConfig,
    platform: Platform,
    how: split.Split,
    layers: list[Params],
    x: jax.Array,
    rotation: rope.Rotation,
    group: list[Pages],
    slot: jax.Array,
    start: jax.Array,
    num_valid: jax.Array,
    stored: attention.StoredBlocks | None = None,
) -> tuple[jax.Array, list[Pages], jax.Array]:
    """One layer group over a tile of one slot, at positions start …, of which `num_valid` rows count.

    `x` `[rows, D]`, its `rotation` and `layers` are what `how` gives this device of the tile and the weights; above one
    device this runs inside a `shard_map`. Returns the new `x`, the group's cache (pass the old one donated) and the
    whole tile's KV as blocks `[M, l, K, 2, Z, H]` in storage dtype, zero from `num_valid` on (K: of the heads that
    this device computes). `start` is a multiple of Z, and the cache has room for M pages there. A tile `ByColumns`
    needs `stored`: the blocks of the prompt's beginning that the cache does not hold.
    """
    cfg = how.own(cfg)
    group, blocks = list(group), []
    for i, layer in enumerate(layers):
        with jax.named_scope(f"layer_{i}"):
            q, k, v = _project(cfg, platform, how, layer, x, rotation)
            tile = how.gather_tile(_stored(k, v, group[i]))
            blocks.append(cache.to_pages(cfg, tile, num_valid))
            group[i] = cache.write_pages(group[i], blocks[i], slot, start // cfg.block_tokens)
            if not isinstance(how, split.ByColumns):
                firsts = [start + first for first in how.firsts(x.shape[0])]
                run_pages = platform.prefill_pages(cfg, how.run_rows(tile.shape[0]))
                few_pages = platform.prefill_fewest_pages(cfg)
                mixed = attention.tile_attention(q, firsts, group[i], slot, platform, run_pages, few_pages)
            else:
                assert stored is not None
                n, run_pages = how.num_devices, platform.tail_pages(cfg)
                mixed = attention.tail_attention(
                    q, tile, start, stored, i, group[i], slot, platform, run_pages, n
                )
            x = _finish_layer(cfg, platform, how, layer, x, mixed.reshape(x.shape[0], -1))
    return x, group, jnp.stack(blocks, axis=1)


def decode_group(
    cfg: LlamaConfig,
    platform: Platform,
    how: split.ByHeads,
    layers: list[Params],
    x: jax.Array,
    rotation: rope.Rotation,
    group: list[Pages],
    positions: jax.Array,
    active: jax.Array,
) -> tuple[jax.Array, list[Pages]]:
    """One layer group for one token of each of the slots 0 … b-1: `x` `[b, D]` at `positions` `[b]`.

    `layers` and `group` are what `how` gives this device; above one device this runs inside a `shard_map`. Inactive
    rows compute something that nobody may read, and write nothing. Returns the new `x` and cache (pass the old one
    donated).
    """
    cfg = how.own(cfg)
    longest = jnp.where(active, positions + 1, 0).max()
    run_pages = platform.decode_pages(cfg, x.shape[0])
    group = list(group)
    for i, layer in enumerate(layers):
        with jax.named_scope(f"layer_{i}"):
            q, k, v = _project(cfg, platform, how, layer, x, rotation)
            group[i] = cache.write_rows(group[i], _stored(k, v, group[i]), positions, active)
            mixed = attention.decode_attention(q, group[i], positions, longest, platform, run_pages)
            x = _finish_layer(cfg, platform, how, layer, x, mixed.reshape(x.shape[0], -1))
    return x, group


def head(cfg: LlamaConfig, platform: Platform, params: Params, x: jax.Array) -> jax.Array:
    """Final norm and output projection: `[T, D]` → logits `[T, V]` float32. `params` has `final_norm` and `lm_head`."""
    with jax.named_scope("head"):
        return linear(platform, norm(x, params["final_norm"], cfg.norm_eps), params["lm_head"])


def linear(platform: Platform, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x` `[T, in]` times `weight` `[out, in]`, in the weight's dtype, float32 accumulation and result; plus
    `bias` `[out]`."""
    rows = x.shape[0]
    x = x.astype(weight.dtype)
    if rows < platform.min_dot_rows:
        x = jnp.pad(x, ((0, platform.min_dot_rows - rows), (0, 0)))
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    y = product(weight, x).T if rows <= platform.weights_first_rows else product(x, weight)
    return split.add_bias(y[:rows], bias)


def norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of `[T, D]` in float32."""
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * weight.astype(jnp.float32)[None]


def _project(
    cfg: LlamaConfig,
    platform: Platform,
    how: split.Split,
    layer: Params,
    x: jax.Array,
    rotation: rope.Rotation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[T, N, H]` (float32), keys and values `[T, K, H]` (compute dtype) of one layer, RoPE applied."""
    N, K, H = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    normed = norm(x, layer["attn_norm"], cfg.norm_eps)
    columns = linear(platform, normed, layer["qkv"], layer.get("qkv_bias"))
    heads = split.gather_columns(columns, how.shares).reshape(-1, N + 2 * K, H)
    turned = rope.rotate(heads[:, : N + K], rotation)
    dtype = layer["qkv"].dtype
    return turned[:, :N], turned[:, N:].astype(dtype), heads[:, N + K :].astype(dtype)


def _stored(keys: jax.Array, values: jax.Array, pages: Pages) -> jax.Array:
    """Keys and values `[T, K, H]` as the cache keeps them, `[T, K, 2, H]`."""
    return cache.to_storage(jnp.stack([keys, values], axis=2), pages.dtype)


def _finish_layer(
    cfg: LlamaConfig, platform: Platform, how: split.Split, layer: Params, x: jax.Array, mixed: jax.Array
) -> jax.Array:
    """Output projection of attention `mixed` `[T, N·H]`, and the gated MLP, each added to the residual `x`."""

    def project(name: str, rows: jax.Array) -> jax.Array:
        weight = layer[name]
        total = how.total(name, linear(platform, rows, weight), weight.dtype)
        return split.add_bias(total, layer.get(f"{name}_bias"))

    x = x + project("out", mixed)
    both = linear(
        platform, norm(x, layer["mlp_norm"], cfg.norm_eps), layer["gate_up"], layer.get("gate_up_bias")
    )
    both = both.reshape(x.shape[0], how.order, 2, -1)
    is_short = platform.short_functions and layer["down"].dtype == jnp.bfloat16
    hidden = (short.silu if is_short else jax.nn.silu)(both[:, :, 0]) * both[:, :, 1]
    hidden = hidden.reshape(x.shape[0], -1)
    return x + project("down", short.to_bfloat16(hidden) if is_short else hidden)


def dense_logits(cfg: LlamaConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """The plain reference: logits `[S, V]` of a whole sequence `[S]`, no cache, float32 at highest precision.

    Takes `params` of any dtype as they come from a checkpoint (see `param_table`).
    """

    def matmul(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        y = jnp.matmul(x, weight.astype(jnp.float32).T, precision="highest")
        return y if bias is None else y + bias.astype(jnp.float32)[None]

    N, K, H = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    rotation = rope.rotation(cfg, jnp.arange(tokens.shape[0]))
    x = jnp.asarray(params["embed"])[tokens].astype(jnp.float32)
    for layer in params["layers"]:
        layer = jax.tree.map(jnp.asarray, layer)
        qkv = matmul(norm(x, layer["attn_norm"], cfg.norm_eps), layer["qkv"], layer.get("qkv_bias"))
        q, k, v = (
            part.reshape(-1, n, H)
            for part, n in zip(jnp.split(qkv, [N * H, (N + K) * H], 1), (N, K, K), strict=True)
        )
        mixed = attention.dense_attention(rope.rotate(q, rotation), rope.rotate(k, rotation), v)
        x = x + matmul(mixed.reshape(-1, N * H), layer["out"], layer.get("out_bias"))
        normed = norm(x, layer["mlp_norm"], cfg.norm_eps)
        gate, up = jnp.split(matmul(normed, layer["gate_up"], layer.get("gate_up_bias")), 2, axis=-1)
        x = x + matmul(jax.nn.silu(gate) * up, layer["down"], layer.get("down_bias"))
    table = jnp.asarray(params.get("lm_head", params["embed"]))
    return matmul(norm(x, jnp.asarray(params["final_norm"]), cfg.norm_eps), table)

"""The steps of a model at its real size, for meshes of devices that are not there: shapes and shardings, no arrays.

`export` lowers a step for CUDA, `memory` says what lies on one device while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from models import cache, llama, pipeline, rope, sharding, split, tensor_parallel
from models.config import LlamaConfig
from models.llama import DTYPES
from models.platform import Platform
from models.sharding import STAGE, TENSOR


@dataclass(frozen=True)
class Step:
    """A function and the shapes, dtypes and shardings it is called with; some arguments are donated."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()

    def jitted(self) -> Any:
        return jax.jit(self.call, donate_argnums=self.donate)

    def export(self, target: str = "cuda") -> jax_export.Exported:
        """Lowered for `target`, which need not be here. It has not run there."""
        return jax_export.export(self.jitted(), platforms=[target])(*self.args)


def prefill_tick(
    cfg: LlamaConfig,
    platform: Platform,
    mesh: Mesh | AbstractMesh,
    *,
    dtype: str,
    chunk_tokens: int,
    num_slots: int,
    max_tokens: int,
) -> Step:
    """A tick of CPP; with one stage, a prefill step under tensor parallelism; on one device, a plain one."""
    X, T = mesh.shape[STAGE], mesh.shape[TENSOR]
    storage = platform.storage_dtype(dtype)
    run = platform.prefill_pages(cfg, chunk_tokens)
    num_pages = _num_pages(cfg, max_tokens + chunk_tokens, run)
    pages = pipeline.abstract_pages(cfg, mesh, storage, num_slots, num_pages)
    args = (
        pipeline.abstract_layers(cfg, mesh, dtype),
        _shape(mesh, (cfg.vocab_size, cfg.d_model), storage),
        pipeline.abstract_x(cfg, mesh, dtype, chunk_tokens),
        pages,
        _shape(mesh, (chunk_tokens,), np.int32),
        _shape(mesh, (X, 3), np.int32, STAGE),
    )
    call = pipeline.tick(cfg, platform, mesh, chunk_tokens)
    return Step(f"prefill stage:{X},tensor:{T}", call, args, donate=(2, 3))


def prefill_by_rows(
    cfg: LlamaConfig,
    platform: Platform,
    devices: Sequence[Any] | int,
    *,
    dtype: str,
    chunk_tokens: int,
    max_tokens: int,
) -> Step:
    """Sequence-parallel prefill of one layer group: rows over `devices` (or so many that are not here)."""
    n = devices if isinstance(devices, int) else len(devices)
    mesh = (
        AbstractMesh((n,), (split.AXIS,), (AxisType.Auto,))
        if isinstance(devices, int)
        else Mesh(np.array(devices), (split.AXIS,))
    )
    how, storage, l = split.ByRows(n), platform.storage_dtype(dtype), cfg.layers_per_group  # noqa: E741
    layers = jax.tree.map(
        lambda param: _shape(mesh, param.shape, DTYPES[dtype]), llama.param_table(cfg)["layers"][:l]
    )
    run = platform.prefill_pages(cfg, how.run_rows(chunk_tokens))
    pages = [
        _shape(mesh, cache.pages_shape(cfg, 1, _num_pages(cfg, max_tokens + chunk_tokens, run)), storage)
    ] * l

    def step(layers: Any, x: jax.Array, pages: Any, where: jax.Array) -> Any:
        slot, start, num_valid = where
        rotation = rope.rotation(cfg, start + how.offsets(x.shape[0]))
        return llama.prefill_group(cfg, platform, how, layers, x, rotation, pages, slot, start, num_valid)

    rows, whole = PartitionSpec(split.AXIS), PartitionSpec()
    call = jax.shard_map(
        step, mesh=mesh, in_specs=(whole, rows, whole, whole), out_specs=(rows, whole, whole), check_vma=False
    )
    x = _shape(mesh, (chunk_tokens, cfg.d_model), np.float32, split.AXIS)
    return Step(f"prefill rows:{n}", call, (layers, x, pages, _shape(mesh, (3,), np.int32)), donate=(2,))


def decode_group(
    cfg: LlamaConfig,
    platform: Platform,
    mesh: Mesh | AbstractMesh,
    *,
    dtype: str,
    batch: int,
    max_tokens: int,
) -> Step:
    """One token for each of `batch` slots through one layer group."""
    storage = platform.storage_dtype(dtype)
    layers = jax.tree.map(
        lambda param: _sharded(mesh, param.shape, DTYPES[dtype], sharding.partition_spec(param.axes)),
        llama.param_table(cfg)["layers"][: cfg.layers_per_group],
    )
    num_pages = _num_pages(cfg, max_tokens, platform.decode_pages(cfg, batch))
    shape = cache.pages_shape(cfg, batch, num_pages)
    pages = [_sharded(mesh, shape, storage, tensor_parallel.PAGES)] * cfg.layers_per_group
    x = _shape(mesh, (batch, cfg.d_model), np.float32)
    rows = (_shape(mesh, (batch,), np.int32), _shape(mesh, (batch,), np.bool_))
    angles = _shape(mesh, (batch, 1, cfg.head_dim // 2), np.float32)
    rotation = rope.Rotation(angles, angles)  # pyright: ignore[reportArgumentType]
    call = tensor_parallel.decode_group(cfg, platform, mesh)
    args = (layers, x, rotation, pages, *rows)
    return Step(f"decode tensor:{mesh.shape[TENSOR]}", call, args, donate=(3,))


def head(cfg: LlamaConfig, platform: Platform, mesh: Mesh | AbstractMesh, *, dtype: str, rows: int) -> Step:
    """Logits of `rows` activations, the vocabulary over the tensor axis."""
    table = llama.param_table(cfg)
    head_table = table.get("lm_head", table["embed"])
    params = {
        "final_norm": _shape(mesh, (cfg.d_model,), DTYPES[dtype]),
        "lm_head": _sharded(
            mesh, head_table.shape, DTYPES[dtype], sharding.partition_spec(("vocab", "embed"))
        ),
    }
    call = lambda params, x: llama.head(cfg, platform, params, x)  # noqa: E731
    return Step("head", call, (params, _shape(mesh, (rows, cfg.d_model), np.float32)))


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Exact from the shardings, but for `temporaries`, which are estimated."""

    parameters: int
    kv: int
    activations: int  # that wait between steps, and new KV on its way out
    temporaries: int

    @property
    def total(self) -> int:
        return self.parameters + self.kv + self.activations + self.temporaries


def nbytes_per_device(tree: Any) -> int:
    """Of arrays, or shapes with shardings: what one device holds of them."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def prefill_memory(cfg: LlamaConfig, platform: Platform, step: Step, head_step: Step) -> Memory:
    """Of `prefill_tick` and the head, on the device that has most."""
    layers, embedding, x, pages, tokens, _ = step.args
    mesh = x.sharding.mesh
    tensor = mesh.shape[TENSOR]
    blocks = pipeline.abstract_blocks(cfg, mesh, pages[0].dtype, -(-tokens.shape[0] // cfg.block_tokens))
    return Memory(
        parameters=nbytes_per_device((layers, embedding, head_step.args[0])),
        kv=nbytes_per_device(pages),
        activations=nbytes_per_device((x, blocks)),
        temporaries=prefill_temporaries(cfg, platform, tokens.shape[0], tensor, x.dtype.itemsize),
    )


def decode_memory(cfg: LlamaConfig, platform: Platform, step: Step, head_step: Step) -> Memory:
    """Of all layer groups of `decode_group`, the embedding and the head."""
    layers, x, _, pages, *_ = step.args
    mesh = x.sharding.mesh
    storage = pages[0].dtype
    embedding = _shape(mesh, (cfg.vocab_size, cfg.d_model), storage)
    batch, keys = x.shape[0], platform.decode_pages(cfg, x.shape[0]) * cfg.block_tokens
    tensor = mesh.shape[TENSOR]
    heads, kv_heads = cfg.num_heads // tensor, cfg.num_kv_heads // tensor
    run = (
        batch
        * keys
        * (2 * kv_heads * cfg.head_dim * 2 * storage.itemsize + heads * (4 + 4 + storage.itemsize))
    )
    mlp = batch * (3 * cfg.d_ff // tensor) * 4
    logits = batch * cfg.vocab_size * 4
    return Memory(
        parameters=cfg.num_groups * nbytes_per_device(layers)
        + nbytes_per_device((embedding, head_step.args[0])),
        kv=cfg.num_groups * nbytes_per_device(pages),
        activations=nbytes_per_device(x),
        temporaries=max(run, mlp, logits) + 4 * batch * cfg.d_model * 4,
    )


def prefill_temporaries(cfg: LlamaConfig, platform: Platform, rows: int, tensor: int, itemsize: int) -> int:
    """Estimate of what a prefill step needs beside its arguments and results, in bytes on one device.

    The residual, its norm, the sum that crosses and its copy on the wire (float32), and the larger of: q, k, v and
    attention's result (float32) with one step of online softmax, whose scores and weights are float32 and once in the
    weights' dtype; gate and up (float32), their product (float32 and in the weights' dtype).
    """
    N, K, H = cfg.num_heads // tensor, cfg.num_kv_heads // tensor, cfg.head_dim
    keys = platform.prefill_pages(cfg, rows) * cfg.block_tokens
    residual = 4 * rows * cfg.d_model * 4
    softmax = min(rows, platform.attention_rows) * keys * N * (4 + 4 + itemsize)
    attention = rows * (3 * N + 2 * K) * H * 4 + softmax
    mlp = rows * cfg.d_ff // tensor * (2 * 4 + 4 + itemsize)
    return residual + max(attention, mlp)


def _num_pages(cfg: LlamaConfig, num_tokens: int, run_pages: int) -> int:
    """For so many tokens; attention reads whole runs of pages."""
    pages = -(-num_tokens // cfg.block_tokens)
    return -(-pages // run_pages) * run_pages


def _shape(mesh: Any, shape: tuple[int, ...], dtype: Any, *axes: str) -> jax.ShapeDtypeStruct:
    return _sharded(mesh, shape, dtype, PartitionSpec(*axes))


def _sharded(mesh: Any, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

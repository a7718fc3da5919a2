"""From the tensors of somebody's file to our parameters: what is fused, what must be there, where it goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from models.checkpoint.errors import CheckpointError
from models.checkpoint.target import Target
from models.checkpoint.tensor import Tensor, TensorSource
from models.config import LlamaConfig
from models.llama import Param, Params, param_table


def assemble(
    cfg: LlamaConfig,
    source: TensorSource,
    names: Mapping[str, str],
    *,
    where: str,
    target: Target,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Params:
    """Fill `param_table(cfg)` from `source`, one parameter at a time.

    `names` maps our part names (`embed`, `q`, `gate`, …) to the format's, `{}` standing for the layer. Each
    array is placed as soon as it is read. Raises CheckpointError before reading anything if a tensor is
    missing, has another shape, or is unknown and not `ignored`.
    """
    table = param_table(cfg)
    plan: list[list[Tensor]] = []
    used: set[str] = set()
    leaves = jax.tree_util.tree_leaves_with_path(table)
    for path, param in leaves:
        plan.append([])
        for part, rows in _parts(cfg, path[-1].key, param):
            name = names[part].format(path[1].idx if len(path) > 1 else "")
            shape = (rows, *param.shape[1:])
            tensor = source.tensors.get(name)
            if tensor is None:
                raise CheckpointError(f"{where}: tensor {name} {shape} is missing")
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{tensor.file}: tensor {name} has shape {tensor.shape}, the config asks for {shape}"
                )
            plan[-1].append(tensor)
            used.add(name)
    if extra := sorted(name for name in source.tensors.keys() - used if not ignored(name)):
        raise CheckpointError(
            f"{source.tensors[extra[0]].file}: {len(extra)} tensors that this model has no place for: "
            f"{', '.join(extra[:5])}"
        )
    arrays: list[Any] = []
    done, total = 0, sum(math.prod(param.shape) for _, param in leaves) * target.numpy_dtype.itemsize
    for parts, (_, param), place in zip(plan, leaves, target.places(table), strict=True):
        array = _read(source, parts, param.shape, target.numpy_dtype)
        done += array.nbytes
        arrays.append(array if place is None else jax.device_put(array, place))
        if target.on_progress is not None:
            target.on_progress(done, total)
    return jax.tree.unflatten(jax.tree.structure(table), arrays)


def _parts(cfg: LlamaConfig, leaf: str, param: Param) -> list[tuple[str, int]]:
    """(part, rows) of one parameter: q, k, v and gate, up stand one after the other in ours."""
    matrix, bias = leaf.removesuffix("_bias"), "_bias" if leaf.endswith("_bias") else ""
    rows, kv_rows = param.shape[0], cfg.num_kv_heads * cfg.head_dim
    match matrix:
        case "qkv":
            parts = [("q", rows - 2 * kv_rows), ("k", kv_rows), ("v", kv_rows)]
        case "gate_up":
            parts = [("gate", rows // 2), ("up", rows // 2)]
        case _:
            parts = [(matrix, rows)]
    return [(part + bias, rows) for part, rows in parts]


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """`names` and, for every `NAME.weight`, part `…_bias` as `NAME.bias`: how all formats call them."""
    biases = {f"{part}_bias": name.removesuffix("weight") + "bias" for part, name in names.items()}
    return {**names, **biases}


def _read(source: TensorSource, parts: list[Tensor], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    out = np.empty(shape, dtype)
    row = 0
    for tensor in parts:
        source.read_into(tensor, out[row : row + tensor.shape[0]])
        row += tensor.shape[0]
    return out

"""A decode step over devices that share the heads (`models.split.ByHeads`), for meshes of `models.sharding`.

Prefill under tensor parallelism is `models.pipeline` with one stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from models import llama, sharding
from models.config import LlamaConfig
from models.llama import Param
from models.platform import Platform
from models.rope import Rotation
from models.sharding import TENSOR
from models.split import ByHeads

PAGES = sharding.partition_spec(("slot", None, "kv_heads", None, None, None))
BLOCKS = sharding.partition_spec((None, None, "kv_heads", None, None, None))
_WHOLE = PartitionSpec()


def place(table: Any, mesh: Mesh, params: Any) -> Any:
    """Host `params` of a `table` of `Param`s on the devices of `mesh`. Only shares of this process's devices are read."""

    def one(param: Param, array: np.ndarray) -> jax.Array:
        order = sharding.row_order(param, mesh.shape[TENSOR])
        where = NamedSharding(mesh, sharding.partition_spec(param.axes))
        share = lambda index: array[(order[index[0]], *index[1:])]  # noqa: E731
        return jax.make_array_from_callback(param.shape, where, share)

    return jax.tree.map(one, table, params, is_leaf=lambda leaf: isinstance(leaf, Param))


def decode_group(cfg: LlamaConfig, platform: Platform, mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """The step `f(layers, x, rotation, pages, positions, active) -> (x, pages)`: see `models.llama.decode_group`.

    `layers` as `place` puts them, pages by KV heads, the rest on every device. Raises ValueError for a mesh that cuts
    more than heads.
    """
    if mesh.size != mesh.shape[TENSOR]:
        raise ValueError(f"decode over {dict(mesh.shape)}: it is split over tensor alone")
    how = ByHeads(mesh.shape[TENSOR])

    def step(
        layers: Any, x: jax.Array, rotation: Rotation, pages: Any, positions: jax.Array, active: jax.Array
    ) -> Any:
        return llama.decode_group(cfg, platform, how, layers, x, rotation, pages, positions, active)

    layers = sharding.specs(llama.param_table(cfg)["layers"][: cfg.layers_per_group])
    given = (layers, _WHOLE, _WHOLE, PAGES, _WHOLE, _WHOLE)
    return jax.shard_map(step, mesh=mesh, in_specs=given, out_specs=(_WHOLE, PAGES), check_vma=False)

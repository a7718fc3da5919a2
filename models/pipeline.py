"""Chunked pipeline parallelism (CPP): the prompt in chunks, the layers in stages (Mooncake, section 5.1).

One tick is one program over the mesh: every stage computes its layers for the chunk it has (`models.ticks`), keeps
their KV, gives it out as blocks, and passes the activations on. The host loops over ticks. A stage without a chunk
computes and writes nothing. Within a stage, `tensor` devices share the heads (`models.split.ByHeads`); the layers
themselves are `models.llama.prefill_group`, as on a single device.

Arrays have the stage as their first axis: `x` `[X, R, D]`, `blocks` `[X, M, l, K, 2, Z, H]` with l = L/X, weights
`[X, …]` and pages `[X, B, P, K, 2, Z, H]`, one of each for every layer of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from models import cache, llama, rope, sharding
from models.config import LlamaConfig
from models.llama import DTYPES, Param, Params
from models.platform import Platform
from models.sharding import STAGE, TENSOR
from models.split import ByHeads
from models.ticks import Tick

_PAGES = sharding.partition_spec(("layers", "slot", None, "kv_heads", None, None, None))
_BLOCKS = sharding.partition_spec(("layers", None, None, "kv_heads", None, None, None))
_BY_STAGE, _EVERYWHERE = PartitionSpec(STAGE), PartitionSpec()


class Result(NamedTuple):
    """Of one tick. `x` and `pages` go into the next one, donated."""

    x: jax.Array  # [X, R, D], activations that stages 1 … X-1 are given
    pages: list[jax.Array]  # of each layer of a stage, [X, B, P, K, 2, Z, H]
    blocks: jax.Array  # [X, M, l, K, 2, Z, H], new KV of every stage's chunk, zero from its last token on
    last: jax.Array  # [X, D] float32, the activations of every chunk's last token after the stage's layers


def stage_table(cfg: LlamaConfig, num_stages: int) -> list[dict[str, Param]]:
    """`Param`s of the layers of a stage, each with those of all stages, `[X, …]`: stage x has layers x·l … x·l+l-1."""
    layers = llama.param_table(cfg)["layers"][: cfg.num_layers // num_stages]
    return [
        {
            name: replace(param, shape=(num_stages, *param.shape), axes=("layers", *param.axes))
            for name, param in layer.items()
        }
        for layer in layers
    ]


def place_layers(cfg: LlamaConfig, mesh: Mesh, layers: Sequence[Params]) -> list[dict[str, jax.Array]]:
    """Host `layers` (of `models.llama.param_table`) on the devices of `mesh`, as `tick` takes them.

    Only the shares of this process's devices are read.
    """
    table = llama.param_table(cfg)["layers"][0]
    stages = stage_table(cfg, mesh.shape[STAGE])
    orders = {name: sharding.row_order(param, mesh.shape[TENSOR]) for name, param in table.items()}

    def place(i: int, name: str, param: Param) -> jax.Array:
        def share(index: Any) -> np.ndarray:
            stage, rows, *columns = index
            (x,) = range(*stage.indices(param.shape[0]))
            weight = layers[x * len(stages) + i][name]
            return weight[(orders[name][rows], *columns)][None]

        where = NamedSharding(mesh, sharding.partition_spec(param.axes))
        return jax.make_array_from_callback(param.shape, where, share)

    return [{name: place(i, name, param) for name, param in layer.items()} for i, layer in enumerate(stages)]


def abstract_layers(cfg: LlamaConfig, mesh: Mesh | AbstractMesh, dtype: str) -> list[dict[str, Any]]:
    """`place_layers` as shapes with shardings."""
    return jax.tree.map(
        lambda param: _shape(mesh, sharding.partition_spec(param.axes), param.shape, DTYPES[dtype]),
        stage_table(cfg, mesh.shape[STAGE]),
    )


def abstract_pages(
    cfg: LlamaConfig, mesh: Mesh | AbstractMesh, storage: np.dtype, num_slots: int, num_pages: int
) -> list[jax.ShapeDtypeStruct]:
    """The KV cache of all stages: an array per layer of a stage, `[X, B, P, K, 2, Z, H]`."""
    X = mesh.shape[STAGE]
    shape = (X, *cache.pages_shape(cfg, num_slots, num_pages))
    return [_shape(mesh, _PAGES, shape, storage) for _ in range(cfg.num_layers // X)]


def abstract_x(cfg: LlamaConfig, mesh: Mesh | AbstractMesh, dtype: str, rows: int) -> jax.ShapeDtypeStruct:
    """Activations between stages, for chunks of at most `rows` tokens: `[X, rows, D]` in the weights' dtype."""
    return _shape(mesh, _BY_STAGE, (mesh.shape[STAGE], rows, cfg.d_model), DTYPES[dtype])


def abstract_blocks(
    cfg: LlamaConfig, mesh: Mesh | AbstractMesh, storage: np.dtype, num_blocks: int
) -> jax.ShapeDtypeStruct:
    """Blocks of every stage, `[X, M, l, K, 2, Z, H]`."""
    X = mesh.shape[STAGE]
    shape = (X, num_blocks, cfg.num_layers // X, cfg.num_kv_heads, 2, cfg.block_tokens, cfg.head_dim)
    return _shape(mesh, _BLOCKS, shape, storage)


def _shape(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def work(tick: Tick) -> np.ndarray:
    """What `tick` tells each stage of its chunk: slot, start, number of tokens, `[X, 3]`."""
    return np.array([(c.slot, c.start, c.num_tokens) if c is not None else (0, 0, 0) for c in tick], np.int32)


def tick(cfg: LlamaConfig, platform: Platform, mesh: Mesh | AbstractMesh, rows: int) -> Callable[..., Result]:
    """The step `f(layers, embedding, x, pages, tokens, work) -> Result` for chunks of up to `rows` tokens.

    `layers` as `place_layers` makes them, `embedding` `[V, D]` on every device, `tokens` `[rows]` of the chunk that
    enters stage 0, `work` `[X, 3]` as `work` makes it. `x` and `pages` are meant to be donated. A chunk's start is a
    multiple of Z, and the cache has room for the pages of `rows` tokens there.
    """
    X, how = mesh.shape[STAGE], ByHeads(mesh.shape[TENSOR])
    if mesh.shape[sharding.DATA] != 1:
        raise ValueError(
            f"data:{mesh.shape[sharding.DATA]} in a pipeline: run one per group of devices instead"
        )

    def on_stage(
        layers: Any, embedding: jax.Array, x: jax.Array, pages: Any, tokens: jax.Array, work: jax.Array
    ) -> Result:
        layers, pages, x = jax.tree.map(lambda a: a[0], (layers, pages, x))
        slot, start, num_valid = work[0]

        def compute(x: jax.Array, pages: Any) -> Any:
            rotation = rope.rotation(cfg, start + how.offsets(x.shape[0]))
            return llama.prefill_group(cfg, platform, how, layers, x, rotation, pages, slot, start, num_valid)

        first = lax.axis_index(STAGE) == 0
        given = jnp.where(first, llama.embed(embedding, tokens), x[:rows].astype(jnp.float32))
        blocks = jax.eval_shape(compute, given, pages)[2]
        y, pages, blocks = _if(num_valid > 0, compute, given, pages, jnp.zeros(blocks.shape, blocks.dtype))
        last = lax.dynamic_index_in_dim(y, jnp.maximum(num_valid - 1, 0), keepdims=False)
        if X > 1:
            with jax.named_scope("pass_on"):
                passed = lax.ppermute(y.astype(x.dtype), STAGE, [(s, s + 1) for s in range(X - 1)])
                x = lax.dynamic_update_slice_in_dim(x, passed, 0, 0)
        return jax.tree.map(lambda a: a[None], Result(x, pages, blocks, last))

    given = (sharding.specs(stage_table(cfg, X)), _EVERYWHERE, _BY_STAGE, _PAGES, _EVERYWHERE, _BY_STAGE)
    returned = Result(_BY_STAGE, _PAGES, _BLOCKS, _BY_STAGE)  # pyright: ignore[reportArgumentType]
    return jax.shard_map(on_stage, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)


def insert(mesh: Mesh | AbstractMesh) -> Callable[..., list[jax.Array]]:
    """The step `f(pages, blocks, where) -> pages` that puts cached prefix blocks `[X, M, l, K, 2, Z, H]` into stages.

    `where` `[X, 3]`: slot, first page, and whether this stage takes any. Pages are meant to be donated.
    """

    def on_stage(pages: Any, blocks: jax.Array, where: jax.Array) -> Any:
        pages, blocks = jax.tree.map(lambda a: a[0], (pages, blocks))
        slot, first_page, takes = where[0]
        _, pages, _ = _if(
            takes > 0,
            lambda x, pages: (x, cache.insert_blocks(pages, blocks, slot, first_page), x),
            takes,
            pages,
            takes,
        )
        return jax.tree.map(lambda a: a[None], pages)

    specs = (_PAGES, _BLOCKS, _BY_STAGE)
    return jax.shard_map(on_stage, mesh=mesh, in_specs=specs, out_specs=_PAGES, check_vma=False)


def _if(condition: jax.Array, compute: Callable[..., Any], x: Any, pages: Any, out: Any) -> Any:
    """`compute(x, pages)`, like `(x, pages, out)`, or these as they are. A loop of one or no turn, because XLA updates
    what a loop carries in place, where it copies what the branches of a conditional return."""
    turns = condition.astype(jnp.int32)
    return lax.fori_loop(0, turns, lambda _, carried: compute(*carried[:2]), (x, pages, out))

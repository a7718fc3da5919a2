"""What a load is to produce, and whom it tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from models.llama import DTYPES, Params


@dataclass(frozen=True)
class Target:
    """`dtype` of every parameter; `shardings`: None for NumPy, one Sharding for all, or a tree of them."""

    dtype: str
    shardings: Any = None
    # called with the bytes of the result that are there, and all of them
    on_progress: Callable[[int, int], None] | None = None

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    def places(self, table: Params) -> list[Any]:
        """One Sharding or None for each parameter of `table`, in tree order."""
        if self.shardings is None or isinstance(self.shardings, jax.sharding.Sharding):
            return [self.shardings] * len(jax.tree.leaves(table))
        places, structure = jax.tree.flatten(self.shardings)
        if structure != jax.tree.structure(table):
            raise ValueError(f"the tree of shardings is not that of the parameters: {structure}")
        return places

"""What a node's work costs: constants from a data file that says where each of them comes from.

Files are JSON in `mooncake_jax/cost_models/` or anywhere else; they are read once and never changed by what uses
them. Seconds, bytes and tokens throughout; every function takes scalars or arrays alike.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvstore.errors import InvalidError
from mooncake_jax.conductor.estimate import CostModel

Cost = Annotated[float, Meta(ge=0.0, le=1e9)]
Positive = Annotated[float, Meta(gt=0.0, le=1e18)]
Number = TypeVar("Number", float, np.ndarray)
Kind = Literal["modelled", "measured"]

_SUFFIX = ".json"


class NodeCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The constants of one kind of node with one model."""

    kv_nbytes_per_token: Positive  # of all layers
    prefill_base_seconds: Cost
    prefill_seconds_per_token: Cost  # linear layers, per computed token
    prefill_seconds_per_pair: Cost  # attention, per (query, key) pair
    prefill_seconds_per_prefix_token: Cost  # of loading reused KV, what computation does not hide
    load_nbytes_per_second: Positive  # KV from DRAM into the device
    ssd_nbytes_per_second: Positive  # from SSD into DRAM
    nic_nbytes_per_second: Positive  # all NICs of a node, each way
    transfer_base_seconds: Cost
    scheduling_seconds: Cost  # from arrival to a place in a queue
    decode_base_seconds: Cost  # a step of a batch of one, without its KV
    decode_seconds_per_extra_request: Cost  # each further request of the batch
    decode_seconds_per_kv_token: Cost
    dram_nbytes: Positive  # for blocks, a node
    hbm_kv_nbytes: Positive  # for KV, a node's devices together

    def prefill_seconds(self, num_tokens: Number, num_prefix: Number) -> Number:
        """Computing a prompt of `num_tokens` of which the first `num_prefix` are reused."""
        pairs = 0.5 * (num_tokens * num_tokens - num_prefix * num_prefix)
        return (
            self.prefill_base_seconds
            + self.prefill_seconds_per_token * (num_tokens - num_prefix)
            + self.prefill_seconds_per_pair * pairs
            + self.prefill_seconds_per_prefix_token * num_prefix
        )

    def step_seconds(self, batch: Number, kv_tokens: Number) -> Number:
        """One decode step of `batch` (1 or more) requests that hold `kv_tokens` together."""
        return (
            self.decode_base_seconds
            + self.decode_seconds_per_extra_request * (batch - 1)
            + self.decode_seconds_per_kv_token * kv_tokens
        )

    def kv_nbytes(self, num_tokens: Number) -> Number:
        return num_tokens * self.kv_nbytes_per_token

    def load_seconds(self, num_tokens: Number) -> Number:
        """Moving the KV of `num_tokens` from DRAM into the device."""
        return self.kv_nbytes(num_tokens) / self.load_nbytes_per_second

    @property
    def dram_tokens(self) -> int:
        return int(self.dram_nbytes / self.kv_nbytes_per_token)

    @property
    def hbm_kv_tokens(self) -> int:
        return int(self.hbm_kv_nbytes / self.kv_nbytes_per_token)

    def estimator(self) -> CostModel:
        """The Conductor's estimators of this node: the same polynomials.

        Raises InvalidError when a batch of one costs less than each further request: the Conductor's base is
        that of an empty batch.
        """
        base = self.decode_base_seconds - self.decode_seconds_per_extra_request
        if base < 0.0:
            raise InvalidError(
                f"decode_base_seconds {self.decode_base_seconds} is below decode_seconds_per_extra_request "
                f"{self.decode_seconds_per_extra_request}"
            )
        return CostModel(
            prefill_base_seconds=self.prefill_base_seconds,
            prefill_seconds_per_token=self.prefill_seconds_per_token,
            prefill_seconds_per_pair=self.prefill_seconds_per_pair,
            prefill_seconds_per_prefix_token=self.prefill_seconds_per_prefix_token,
            transfer_base_seconds=self.transfer_base_seconds,
            transfer_nbytes_per_second=self.nic_nbytes_per_second,
            ssd_nbytes_per_second=self.ssd_nbytes_per_second,
            tbt_base_seconds=base,
            tbt_seconds_per_request=self.decode_seconds_per_extra_request,
            tbt_seconds_per_kv_token=self.decode_seconds_per_kv_token,
        )


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value and where it comes from."""

    value: float
    source: Annotated[str, Meta(min_length=1)]


class CostModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cost model as it lies on disk. `kind` labels every figure made with it."""

    name: str
    kind: Kind
    description: str
    constants: dict[str, Constant]  # by field of `NodeCosts`, every one of them
    version: Literal[1] = 1

    @property
    def costs(self) -> NodeCosts:
        """Raises InvalidError for a missing, unknown or impossible constant."""
        values = {name: constant.value for name, constant in self.constants.items()}
        try:
            return msgspec.convert(values, NodeCosts)
        except msgspec.ValidationError as error:
            raise InvalidError(f"cost model {self.name}: {error}") from error

    @classmethod
    def load(cls, name: str | Path) -> CostModelFile:
        """Read a file by its path, or one of `names()`.

        Raises InvalidError that names the file, and the field that is wrong.
        """
        path = Path(name)
        try:
            if path.suffix == _SUFFIX:
                raw = path.read_bytes()
            elif str(name) in names():
                raw = _package().joinpath(f"{name}{_SUFFIX}").read_bytes()
            else:
                raise InvalidError(f"cost model {name!s}: expected a {_SUFFIX} file or one of {names()}")
            file = msgspec.json.decode(raw, type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidError(f"cost model {name}: {error}") from error
        file.costs  # noqa: B018  a bad constant is found here, not in the middle of a run
        return file

    def write(self, path: str | Path) -> None:
        """Write the file, one constant a line. Raises InvalidError for bad constants, OSError."""
        self.costs  # noqa: B018
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def names() -> list[str]:
    """The cost models that come with the package."""
    return sorted(
        entry.name.removesuffix(_SUFFIX) for entry in _package().iterdir() if entry.name.endswith(_SUFFIX)
    )


def _package() -> Traversable:
    return resources.files("mooncake_jax") / "cost_models"

"""Our own checkpoint: what every other format is converted to once.

checkpoint.json    format, config, dtype, weights fingerprint; without it the folder is no checkpoint
params/            the parameter tree, by Orbax
tokenizer/         tokenizer.json and tokenizer_settings.json; absent for random weights
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from models.checkpoint.errors import CheckpointError
from models.checkpoint.model import Model
from models.checkpoint.target import Target
from models.config import LlamaConfig, RopeScaling
from models.llama import DTYPES, Params, check_params, param_table
from models.tokenizer import Tokenizer, TokenizerError

FORMAT = 1
MANIFEST_FILE = "checkpoint.json"
_PARAMS, _TOKENIZER = "params", "tokenizer"
_MIN_BATCH_NBYTES = 4 << 20


def save_checkpoint(path: str | os.PathLike[str], model: Model) -> None:
    """Write `model` to the new folder `path`, complete or not at all: it is renamed into place at the end.

    Raises CheckpointError if `path` exists or the parameters are not those of the config.
    """
    path = Path(path).absolute()
    if path.exists():
        raise CheckpointError(f"{path}: exists already; remove it or choose another folder")
    try:
        check_params(model.cfg, model.params, model.dtype)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    manifest = {
        "format": FORMAT,
        "config": asdict(model.cfg),
        "dtype": model.dtype,
        "fingerprint": model.fingerprint.hex(),
    }
    partial = path.with_name(partial_name(path, f"{os.getpid()}-{secrets.token_hex(4)}"))
    try:
        partial.mkdir(parents=True)
        with _checkpointer() as checkpointer:
            checkpointer.save(partial / _PARAMS, args=ocp.args.PyTreeSave(model.params))
        if model.tokenizer is not None:
            model.tokenizer.save(partial / _TOKENIZER)
        (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")
        try:
            partial.rename(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be put in place: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_name(path: Path, writer: str) -> str:
    """The folder beside `path` in which `writer` prepares it."""
    return f".{path.name}.partial-{writer}"


def load_orbax(path: Path, target: Target, *, verify: bool = True) -> Model:
    """Read what `save_checkpoint` wrote, under our placement, whatever devices it was saved from.

    See `load_model`. With `verify` the fingerprint is computed anew and compared (about a second per GB and
    core); it cannot be where the dtype changes.
    """
    path = path.absolute()
    manifest = _read_manifest(path)
    cfg, tokenizer = read_text(path)
    params = _restore(path / _PARAMS, cfg, target)
    model = Model(cfg, params, tokenizer, target.dtype)
    if verify and target.dtype == manifest["dtype"] and model.fingerprint.hex() != manifest["fingerprint"]:
        raise CheckpointError(
            f"{path}: the weights have fingerprint {model.fingerprint.hex()}, {MANIFEST_FILE} says "
            f"{manifest['fingerprint']}: the checkpoint is damaged; convert it again"
        )
    return model


def read_text(path: Path) -> tuple[LlamaConfig, Tokenizer | None]:
    """Config and tokenizer of the checkpoint at `path`; no weights are read."""
    cfg = _config(path, _read_manifest(path))
    try:
        return cfg, Tokenizer.load(path / _TOKENIZER) if (path / _TOKENIZER).exists() else None
    except TokenizerError as error:
        raise CheckpointError(str(error)) from error


def saved_dtype(path: Path) -> str:
    """The dtype of the checkpoint at `path`, from its manifest."""
    return _read_manifest(path)["dtype"]


def _restore(path: Path, cfg: LlamaConfig, target: Target) -> Params:
    """The parameters, some at a time: Orbax needs what one call restores a second time, and a third onto devices.

    So it reads into host memory, from where one array after the other goes to its devices.
    """
    table = param_table(cfg)
    leaves, structure = jax.tree.flatten(table)
    sizes = [math.prod(param.shape) * target.numpy_dtype.itemsize for param in leaves]
    places = target.places(table)
    args = [ocp.RestoreArgs(restore_type=np.ndarray, dtype=target.numpy_dtype)] * len(leaves)
    arrays: list[Any] = []
    with _checkpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(path).item_metadata.tree  # pyright: ignore[reportOptionalMemberAccess]
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: no Orbax checkpoint: {error}") from error
        _compare(path, table, saved)
        while len(arrays) < len(leaves):
            now = range(len(arrays), _batch_end(sizes, len(arrays)))

            def only(values: list[Any], now: range = now) -> Params:
                return structure.unflatten([v if k in now else ocp.PLACEHOLDER for k, v in enumerate(values)])

            wanted = ocp.args.PyTreeRestore(item=only(leaves), restore_args=only(args))
            try:
                restored = checkpointer.restore(path, args=wanted)
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(f"{path}: cannot be restored: {error}") from error
            hosted = structure.flatten_up_to(restored)[now.start : now.stop]
            del restored
            for place in places[now.start : now.stop]:
                array = hosted.pop(0)
                arrays.append(array if place is None else jax.block_until_ready(jax.device_put(array, place)))
            _release_freed()
            if target.on_progress is not None:
                target.on_progress(sum(sizes[: now.stop]), sum(sizes))
    return structure.unflatten(arrays)


def _release_freed() -> None:
    """Freed memory goes back to the system; glibc keeps large blocks for later, in pieces that no array fits."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _batch_end(sizes: list[int], start: int) -> int:
    """End of the parameters restored together with `start`: a 32nd of all bytes, one at least."""
    limit = max(_MIN_BATCH_NBYTES, sum(sizes) // 32)
    end = start + 1
    while end < len(sizes) and sum(sizes[start : end + 1]) <= limit:
        end += 1
    return end


def _compare(path: Path, table: Params, saved: Any) -> None:
    """Names and shapes on disk must be those of the config."""
    expected = {name: tuple(param.shape) for name, param in _named(table)}
    actual = {name: tuple(leaf.shape) for name, leaf in _named(saved)}
    if missing := sorted(expected.keys() - actual.keys()):
        raise CheckpointError(f"{path}: {len(missing)} parameters are missing: {', '.join(missing[:5])}")
    if extra := sorted(actual.keys() - expected.keys()):
        raise CheckpointError(
            f"{path}: {len(extra)} parameters that this model has no place for: {', '.join(extra[:5])}"
        )
    for name, shape in expected.items():
        if actual[name] != shape:
            raise CheckpointError(f"{path}: {name} has shape {actual[name]}, the config asks for {shape}")


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_text())
        missing = {"format", "config", "dtype", "fingerprint"} - manifest.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a checkpoint's manifest: {error}") from error
    if missing:
        raise CheckpointError(f"{file}: fields missing: {', '.join(sorted(missing))}")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{file}: format {manifest['format']}; this version reads {FORMAT}: convert it again"
        )
    if manifest["dtype"] not in DTYPES:
        raise CheckpointError(f"{file}: dtype {manifest['dtype']!r}; expected one of {sorted(DTYPES)}")
    return manifest


def _config(path: Path, manifest: dict[str, Any]) -> LlamaConfig:
    try:
        fields = dict(manifest["config"])
        if fields.get("rope_scaling") is not None:
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        return LlamaConfig(**fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST_FILE}: config: {error}") from error


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

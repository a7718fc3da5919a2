"""A cluster of real processes with a tiny model: it serves, survives any role's death, leaves nothing."""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from launch.local_cluster import Cluster, ClusterConfig, _engines, _stores, core_sets
from launch.supervisor import SupervisorError

ROLES = ("directory", "conductor", "frontend", "store-0", "prefill-0", "decode-0")
PROMPT = "It is a truth universally acknowledged"  # 38 bytes: two blocks of 16 and a rest


def ask(cluster, **fields):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(body | fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def until(check, what, seconds=120):
    """Retries `check` until it raises nothing."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check()
        except (OSError, AssertionError):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds} s: {what}")
            time.sleep(0.1)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    config = ClusterConfig(
        model="preset:tiny",
        run_dir=folder / "logs",
        dtype="float32",
        num_prefill=1,
        max_tokens=64,
        prefill_slots=1,
        decode_slots=1,
        dram_nbytes=8 << 20,
        staging_nbytes=8 << 20,
        compile_cache=str(folder / "compiled"),
        ready_seconds=400,
    )
    ready = {}
    with Cluster(config, lambda name, address: ready.update({name: address})) as cluster:
        assert set(ready) == set(ROLES)
        yield cluster
        pids = [cluster.supervisor.pid(name) for name in ROLES]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids)), "a process outlived its cluster"
    for pid in pids:
        assert not list(Path("/dev/shm").glob(f"mooncake-{pid}-*")), "shared memory is left"


def test_it_serves_and_reuses(cluster):
    first = ask(cluster)
    again = until(lambda: reused(cluster), "the prompt's blocks are reused")
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert again["mooncake"]["prefill"] == "prefill-0"
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=10) as response:
        metrics = response.read().decode()
    assert 'mooncake_instance_compiles_after_ready{instance="prefill-0",role="prefill"} 0.0' in metrics


def reused(cluster):
    answer = ask(cluster)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    return answer


@pytest.mark.parametrize("name", ROLES)
def test_a_killed_role_comes_back(cluster, name):
    expected = ask(cluster)["choices"][0]["token_ids"]
    old = cluster.supervisor.pid(name)
    os.kill(old, signal.SIGKILL)

    def serves_again():
        assert cluster.supervisor.pid(name) not in (old, None)
        assert cluster.supervisor.address(name)
        assert ask(cluster)["choices"][0]["token_ids"] == expected

    until(serves_again, f"{name} is back")
    assert not list(Path("/dev/shm").glob(f"mooncake-{old}-*")), "shared memory of the dead process is left"


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    config = ClusterConfig(model="/nowhere", run_dir=tmp_path, num_stores=0)
    with pytest.raises(SupervisorError, match="/nowhere"):
        Cluster(config)
    for log in tmp_path.glob("*.log"):
        for line in log.read_text().splitlines():
            assert "Traceback" not in line, log


def test_every_store_node_has_an_ssd_folder_of_its_own(tmp_path):
    config = ClusterConfig(model="m", run_dir=tmp_path, num_prefill=2, ssd_path="/ssd", ssd_nbytes=1000)
    commands = [*_engines(config, "directory", ["conductor"]).values(), *_stores(config, "directory")]
    assert [command.name for command in commands] == ["prefill-0", "prefill-1", "decode-0", "store-0"]
    for command in commands:
        assert {f"--ssd_path=/ssd/{command.name}", "--ssd_nbytes=1000"} <= set(command.argv)
    with pytest.raises(ValueError, match="both or none"):
        ClusterConfig(model="m", run_dir=tmp_path, ssd_path="/ssd")


def test_core_sets():
    assert core_sets([0, 1, 2, 3, 4, 5], 3) == [[0, 3], [1, 4], [2, 5]]
    assert core_sets([4, 7], 3) == [[4], [7], [4]]

"""The upstream Mooncake Store as a peer: run by *its* Python, driven by JSON lines on stdin.

    mooncake/bin/python mooncake_store_peer.py NUM_BLOCKS BLOCK_NBYTES RANGE_NBYTES

Three processes over TCP on loopback: its master, a node that holds `NUM_BLOCKS` objects, and this one, which has a
segment of its own. `{"op": name, "count": n}` → `{"seconds": s}` for n single operations or one batch; an operation
that the store refuses ends the process. What is put is removed again after the clock has stopped.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("GLOG_minloglevel", "2")
SMALL_NBYTES = 4096


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_master() -> int:
    port = free_port()
    subprocess.Popen(
        [
            Path(sys.executable).with_name("mooncake_master"),
            f"--rpc_port={port}",
            f"--metrics_port={free_port()}",
            "--rpc_address=127.0.0.1",
            "--client_ttl=300",  # a busy machine is no reason to forget a node
        ],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"},
        stdin=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return port
        if time.monotonic() > deadline:
            sys.exit("mooncake_master does not listen")
        time.sleep(0.1)


def connect(master: int, segment_nbytes: int):
    from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportMissingImports]

    store = MooncakeDistributedStore()
    expect(
        {
            store.setup(
                "127.0.0.1", "P2PHANDSHAKE", segment_nbytes, 128 << 20, "tcp", "", f"127.0.0.1:{master}"
            )
        },
        {0},
    )
    return store


def expect(got, wanted) -> None:
    if got != wanted:
        sys.exit(f"the store answered {got}, expected {wanted}")


def hold(master: int, num: int, nbytes: int, ready, done) -> None:
    import numpy as np

    store = connect(master, num * nbytes + (128 << 20))
    data = np.random.default_rng(1).integers(0, 256, num * nbytes, np.uint8)
    store.register_buffer(data.ctypes.data, data.nbytes)
    keys = [f"far{i}" for i in range(num)]
    status = store.batch_put_from(keys, [data.ctypes.data + i * nbytes for i in range(num)], [nbytes] * num)
    ready.put(set(status))
    done.get()
    os._exit(0)


class Work:
    def __init__(self, master: int, num: int, nbytes: int, range_nbytes: int):
        import numpy as np
        from mooncake.store import ReplicateConfig  # pyright: ignore[reportMissingImports]

        self.store = connect(master, 2 * num * nbytes + (256 << 20))
        self.here = ReplicateConfig()
        self.here.preferred_segment = self.store.get_hostname()
        self.num, self.nbytes, self.range_nbytes = num, nbytes, range_nbytes
        self.data = np.random.default_rng(2).integers(0, 256, num * nbytes, np.uint8)
        self.into = np.ones(num * nbytes, np.uint8)
        for buffer in (self.data, self.into):
            self.store.register_buffer(buffer.ctypes.data, buffer.nbytes)
        self.fresh = (f"fresh{i}" for i in itertools.count())
        self.put([f"near{i}" for i in range(num)])
        self.small = [f"small{i}" for i in range(64)]
        expect({self.store.put(key, b"x" * SMALL_NBYTES, self.here) for key in self.small}, {0})

    def put(self, keys: list[str]) -> None:
        starts = [self.data.ctypes.data + i * self.nbytes for i in range(self.num)]
        expect(set(self.store.batch_put_from(keys, starts, [self.nbytes] * self.num, self.here)), {0})

    def get(self, keys: list[str]) -> float:
        starts = [self.into.ctypes.data + i * self.nbytes for i in range(self.num)]
        begin = time.perf_counter()
        got = self.store.batch_get_into(keys, starts, [self.nbytes] * self.num)
        seconds = time.perf_counter() - begin
        expect(set(got), {self.nbytes})
        return seconds

    def batch_put(self, _: int) -> float:
        keys = list(itertools.islice(self.fresh, self.num))
        begin = time.perf_counter()
        self.put(keys)
        seconds = time.perf_counter() - begin
        expect(set(self.store.batch_remove(keys, True)), {0})
        return seconds

    def batch_get_local(self, _: int) -> float:
        return self.get([f"near{i}" for i in range(self.num)])

    def batch_get_remote(self, _: int) -> float:
        return self.get([f"far{i}" for i in range(self.num)])

    def range_get(self, _: int) -> float:
        part = self.range_nbytes
        keys = [f"far{i}" for i in range(self.num)]
        into = [[i * part] for i in range(self.num)]
        begin = time.perf_counter()
        got = self.store.get_into_ranges(
            [self.into.ctypes.data], [keys], [into], [[[part]] * self.num], [[[part]] * self.num]
        )
        seconds = time.perf_counter() - begin
        expect({n for some in got for ranges in some for n in ranges}, {part})
        return seconds

    def put_small(self, count: int) -> float:
        keys, value = list(itertools.islice(self.fresh, count)), b"x" * SMALL_NBYTES
        begin = time.perf_counter()
        status = [self.store.put(key, value, self.here) for key in keys]
        seconds = time.perf_counter() - begin
        expect(set(status), {0})
        expect(set(self.store.batch_remove(keys, True)), {0})
        return seconds

    def put_small_batch(self, count: int) -> float:
        keys = list(itertools.islice(self.fresh, count))
        starts = [self.data.ctypes.data + i * SMALL_NBYTES for i in range(count)]
        sizes = [SMALL_NBYTES] * count
        begin = time.perf_counter()
        status = self.store.batch_put_from(keys, starts, sizes, self.here)
        seconds = time.perf_counter() - begin
        expect(set(status), {0})
        expect(set(self.store.batch_remove(keys, True)), {0})
        return seconds

    def get_small(self, count: int) -> float:
        keys = [self.small[i % len(self.small)] for i in range(count)]
        begin = time.perf_counter()
        sizes = {len(self.store.get(key)) for key in keys}
        seconds = time.perf_counter() - begin
        expect(sizes, {SMALL_NBYTES})
        return seconds

    def exists_fresh(self, count: int) -> float:
        return self.exists(count)

    def exists(self, count: int) -> float:
        keys = [self.small[i % len(self.small)] for i in range(count)]
        begin = time.perf_counter()
        found = [self.store.is_exist(key) for key in keys]
        seconds = time.perf_counter() - begin
        expect(set(found), {1})
        return seconds


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    num, nbytes, range_nbytes = map(int, sys.argv[1:])
    master = start_master()
    ready, done = multiprocessing.Queue(), multiprocessing.Queue()
    multiprocessing.Process(target=hold, args=(master, num, nbytes, ready, done), daemon=True).start()
    expect(ready.get(), {0})
    work = Work(master, num, nbytes, range_nbytes)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps({"seconds": getattr(work, job["op"])(job["count"])}), file=answers, flush=True)
    done.put(True)
    os._exit(0)


if __name__ == "__main__":
    main()

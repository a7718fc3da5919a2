"""The upstream Mooncake transfer engine as a peer: run by *its* Python, driven by JSON lines on stdin.

`{"op": "write"|"read", "piece": nbytes, "total": nbytes, "times": n}` → `{"seconds": s}`; two processes over TCP on
loopback, `n` batches of `total` bytes one after the other.
"""

import json
import multiprocessing
import os
import sys
import time

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
NBYTES = 1 << 28


def target(ready, done) -> None:
    import numpy as np
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    engine = TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    memory = np.zeros(NBYTES, np.uint8)
    engine.register_memory(memory.ctypes.data, NBYTES)
    ready.put((engine.get_rpc_port(), memory.ctypes.data))
    done.get()
    os._exit(0)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ready, done = multiprocessing.Queue(), multiprocessing.Queue()
    process = multiprocessing.Process(target=target, args=(ready, done), daemon=True)
    process.start()
    port, remote = ready.get()
    import numpy as np
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    engine = TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    memory = np.ones(NBYTES, np.uint8)
    engine.register_memory(memory.ctypes.data, NBYTES)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        total, piece = job["total"], job["piece"]
        offsets = [*range(0, total, 2 * piece), *range(piece, total, 2 * piece)]
        local, peer = [memory.ctypes.data + o for o in offsets], [remote + o for o in offsets]
        call = engine.batch_transfer_sync_write if job["op"] == "write" else engine.batch_transfer_sync_read
        start = time.perf_counter()
        statuses = [call(f"127.0.0.1:{port}", local, peer, [piece] * len(local)) for _ in range(job["times"])]
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "status": max(statuses, key=abs)}), file=answers, flush=True)
    done.put(True)
    os._exit(0)


if __name__ == "__main__":
    main()

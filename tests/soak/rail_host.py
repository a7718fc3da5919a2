"""One side of the network test, run inside a network namespace; JSON lines on stdin, an answer to each on stdout.

rail_host.py ADDRESS...
    {"register": seed}                    → the segment, filled with bytes of that seed (0: zeros)
    {"segment": …, "opcode": 1, "half": true}
        → {"half": true} when half has arrived, if asked for; then {"seconds", "rails", "resubmitted", "states"}
    {"crc": true}                         → crc32 of the registered memory
"""

import json
import sys
import time
import zlib

import msgspec
import numpy as np

from kvstore.transfer import Segment, TransferEngine, TransferRequest
from kvstore.transfer.request import Opcode

PIECE_NBYTES = 4 << 20


def main(nbytes: int, addresses: list[str]) -> None:
    engine = TransferEngine(host_id=addresses[0], rails=addresses, timeout_seconds=60)
    try:
        serve(engine, np.zeros(nbytes, np.uint8))
    finally:
        engine.close()


def serve(engine: TransferEngine, memory: np.ndarray) -> None:
    segment = engine.register_local_memory(memory, name="memory")
    for line in sys.stdin:
        job = json.loads(line)
        if "register" in job:
            fill(memory, job["register"])
            say(msgspec.to_builtins(segment))
        elif "crc" in job:
            say(zlib.crc32(memory))
        else:
            far = msgspec.convert(job["segment"], Segment)
            say(move(engine, memory, far, Opcode(job["opcode"]), job.get("half", False)))


def fill(memory: np.ndarray, seed: int) -> None:
    """Random bytes that repeat at an odd distance, so that a piece in a wrong place is a wrong piece."""
    memory[:] = 0
    block = np.random.default_rng(seed).integers(0, 256, 16_777_213, np.uint8)
    for at in range(0, len(memory) if seed else 0, len(block)):
        memory[at : at + len(block)] = block[: len(memory) - at]


def move(engine: TransferEngine, memory: np.ndarray, far: Segment, opcode: Opcode, half: bool) -> dict:
    view = memory.data
    requests = [
        TransferRequest(opcode, view[at : at + PIECE_NBYTES], far, at)
        for at in range(0, len(view), PIECE_NBYTES)
    ]
    before = {tuple(rail.address): rail.nbytes for rail in engine.rails()}
    resubmitted = engine.counters()["resubmitted"]
    batch = engine.allocate_batch_id(len(requests))
    began = time.monotonic()
    engine.submit_transfer(batch, requests)
    while half and sum(status.nbytes_done for status in engine.wait(batch, 0.02)) < len(view) // 2:
        pass
    if half:
        say({"half": True})
    statuses = engine.wait(batch)
    seconds = time.monotonic() - began
    engine.free_batch_id(batch)
    return {
        "seconds": seconds,
        "rails": [rail.nbytes - before.get(tuple(rail.address), 0) for rail in engine.rails()],
        "resubmitted": engine.counters()["resubmitted"] - resubmitted,
        "states": sorted({str(status.state) for status in statuses}),
    }


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

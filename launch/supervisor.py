"""Starts processes, restarts those that die, and leaves no process and no shared memory behind."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launch.process import CLOSE_SECONDS, EXIT_USAGE, PARENT

GRACE_SECONDS = CLOSE_SECONDS + 3.0  # who ends in time does so by itself
END_SECONDS = GRACE_SECONDS + 12.0  # that a process with a supervisor needs, at most, to end
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.25, 8.0
STEADY_SECONDS = 30.0  # who ran this long starts at the first backoff again
POLL_SECONDS = 0.05
TAIL_NBYTES = 4000
SHARED_MEMORY = Path("/dev/shm")
log = logging.getLogger(__name__)


class SupervisorError(Exception):
    """A process cannot be had; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Command:
    """A process to keep running: `python argv…`, which prints `ready NAME ADDRESS`."""

    name: str
    argv: tuple[str, ...]
    keeps_port: bool = False  # restarted with `--port=` the port it had: others know it by its address


@dataclass
class _Run:
    """One life of a child."""

    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    log: IO[bytes]
    started: float
    line: bytes = b""  # printed so far of the line that is not complete


@dataclass
class _Child:
    command: Command
    log_path: Path
    run: _Run | None = None
    address: str | None = None  # None until it is ready
    port: str | None = None
    start_at: float = 0.0
    num_starts: int = 0
    num_failures: int = 0  # in a row
    given_up: bool = False


class Supervisor:
    """Owns child processes from `start` to `close`. One thread starts, watches and restarts them all."""

    def __init__(
        self,
        run_dir: Path,
        *,
        grace_seconds: float = GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Logs go to `run_dir`/NAME.log. `grace_seconds`: from SIGTERM to SIGKILL."""
        self.run_dir, self.grace_seconds = run_dir, grace_seconds
        run_dir.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._children: dict[str, _Child] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_receive, self._wake_send = os.pipe()
        self._selector.register(self._wake_receive, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="supervisor")
        self._thread.start()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, command: Command) -> None:
        """Start `command` and keep it running. Raises ValueError when the name is taken, or after `close`."""
        with self._changed:
            if self._closing or command.name in self._children:
                raise ValueError(
                    f"{command.name} cannot be started: the name is taken or the supervisor closed"
                )
            log_path = self.run_dir / f"{command.name}.log"
            log_path.unlink(missing_ok=True)  # of an earlier run
            self._children[command.name] = _Child(command, log_path)
        os.write(self._wake_send, b"x")

    def wait_ready(
        self, names: Iterable[str], timeout_seconds: float, progress: Callable[[str, str], None] | None = None
    ) -> dict[str, str]:
        """Addresses by name, once all are ready; `progress(name, address)` as each becomes so.

        Raises SupervisorError when one ends for good, fails three times in a row, or is late.
        """
        waiting, found = list(names), {}
        deadline = self._clock() + timeout_seconds
        while waiting:
            with self._changed:
                self._changed.wait(POLL_SECONDS)
                ready = {n: a for n in waiting if (a := self._children[n].address)}
                failed = [n for n in waiting if self._failed(self._children[n])]
            found |= ready
            for name, address in ready.items():
                waiting.remove(name)
                if progress:
                    progress(name, address)
            if failed:
                raise SupervisorError(f"{failed[0]} does not start:\n{self.log_tail(failed[0])}")
            if waiting and self._clock() > deadline:
                late = f"not ready after {timeout_seconds:g} s: {', '.join(waiting)}"
                raise SupervisorError(f"{late}\n{self.log_tail(waiting[0])}")
        return found

    def address(self, name: str) -> str | None:
        """Where `name` serves; None while it does not."""
        with self._changed:
            return self._children[name].address

    def pid(self, name: str) -> int | None:
        with self._changed:
            run = self._children[name].run
            return run.process.pid if run else None

    def num_starts(self, name: str) -> int:
        with self._changed:
            return self._children[name].num_starts

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one child: it is restarted if it dies of it."""
        with self._changed:
            run = self._children[name].run
            if run and run.process.poll() is None:
                run.process.send_signal(number)

    def log_tail(self, name: str) -> str:
        raw = (self.run_dir / f"{name}.log").read_bytes() if self._children[name].num_starts else b""
        return raw[-TAIL_NBYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        """SIGTERM to all, SIGKILL to who is still there after the grace, and wait until all are gone."""
        with self._changed:
            self._closing = True
        try:
            os.write(self._wake_send, b"x")
        except OSError:
            return  # closed before
        self._thread.join()

    # the supervisor's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._read(POLL_SECONDS)
                now = self._clock()
                with self._changed:
                    for child in self._children.values():
                        if child.run and child.run.process.poll() is not None:
                            self._bury(child, child.run)
                        elif not child.run and not child.given_up and now >= child.start_at:
                            self._try_to_spawn(child)
                    self._changed.notify_all()
        finally:
            self._end_all()
            self._selector.close()
            os.close(self._wake_receive)
            os.close(self._wake_send)

    def _try_to_spawn(self, child: _Child) -> None:
        """Out of memory, processes or files is a failed start like any other: tried again later."""
        try:
            self._spawn(child)
        except OSError as error:
            log.warning("%s cannot be started: %s", child.command.name, error)
            child.num_failures += 1
            child.start_at = self._clock() + backoff_seconds(child.num_failures)

    def _spawn(self, child: _Child) -> None:
        argv = [sys.executable, *child.command.argv]
        if child.command.keeps_port and child.port:
            argv.append(f"--port={child.port}")
        log_file = child.log_path.open("ab")
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on
            )
        except OSError:
            log_file.close()
            raise
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        child.run = _Run(process, process.stdout, log_file, self._clock())
        child.num_starts += 1
        self._selector.register(process.stdout, selectors.EVENT_READ, child)

    def _read(self, timeout_seconds: float) -> None:
        for key, _ in self._selector.select(timeout_seconds):
            if key.data is None:
                os.read(self._wake_receive, 4096)
            elif key.data.run:
                self._drain(key.data, key.data.run)

    def _drain(self, child: _Child, run: _Run) -> None:
        """Copy what the child printed to its log, and note its ready line."""
        raw = run.stdout.read()
        if not raw:
            if raw == b"" and run.stdout in self._selector.get_map():
                self._selector.unregister(run.stdout)
            return
        run.log.write(raw)
        run.log.flush()
        *lines, run.line = (run.line + raw).split(b"\n")
        for line in lines:
            words = line.decode(errors="replace").split()
            if len(words) == 3 and words[0] == "ready":
                with self._changed:
                    child.address, child.port = words[2], words[2].rpartition(":")[2]
                    self._changed.notify_all()

    def _bury(self, child: _Child, run: _Run) -> None:
        """The child has ended: collect its output and its leftovers, and plan its restart."""
        self._drain(child, run)
        if run.stdout in self._selector.get_map():
            self._selector.unregister(run.stdout)
        run.stdout.close()
        run.log.close()
        exit_code, pid = run.process.wait(), run.process.pid
        _kill_group(pid)
        _sweep(pid)
        steady = child.address is not None and self._clock() - run.started > STEADY_SECONDS
        child.num_failures = 1 if steady else child.num_failures + 1
        child.given_up = exit_code == EXIT_USAGE
        child.run = child.address = None
        child.start_at = self._clock() + backoff_seconds(child.num_failures)
        if not self._closing:
            log.warning("%s (pid %d) ended with %s", child.command.name, pid, exit_code)

    @staticmethod
    def _failed(child: _Child) -> bool:
        return child.given_up or (child.address is None and child.num_failures >= 3)

    def _end_all(self) -> None:
        with self._changed:
            alive = [(child, child.run) for child in self._children.values() if child.run]
            for _, run in alive:
                run.process.terminate()
                run.process.send_signal(signal.SIGCONT)  # a stopped process could not end
            deadline = self._clock() + self.grace_seconds
            while any(run.process.poll() is None for _, run in alive) and self._clock() < deadline:
                self._read(POLL_SECONDS)
            for child, run in alive:
                if run.process.poll() is None:
                    log.warning("%s does not end: killed", child.command.name)
                    run.process.kill()
                run.process.wait()
                self._bury(child, run)


def backoff_seconds(num_failures: int) -> float:
    """Before the next start, after `num_failures` in a row."""
    return min(FIRST_BACKOFF_SECONDS * 2 ** (num_failures - 1), LAST_BACKOFF_SECONDS)


def _kill_group(pid: int) -> None:
    """End what a dead child may have left running: it led a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _sweep(pid: int) -> None:
    """Remove shared memory files that a dead child could not remove itself."""
    for path in SHARED_MEMORY.glob(f"mooncake-{pid}-*"):
        path.unlink(missing_ok=True)

"""The life of one role's process: flags, signals, the ready line, a clean end.

A role prints `ready NAME ADDRESS` when it serves. SIGTERM and SIGINT close it: exit 0. Bad flags or a bad
model end it with one line on stderr: exit 2, and a supervisor does not try again. Anything else is exit 1.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import NoReturn

from absl import app, flags
from absl import logging as absl_logging

from kvstore.errors import StoreError

CLOSE_SECONDS = 15.0  # after a signal; the process is killed then
EXIT_FAILED, EXIT_USAGE = 1, 2
PARENT = "MOONCAKE_PARENT_PID"  # set by a supervisor: the process ends with it
_PR_SET_PDEATHSIG = 1
log = logging.getLogger(__name__)


class UsageError(Exception):
    """What the user asked for cannot work; the message says what to do."""


class _Stop(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as a shell tells it


def run_role(build: Callable[[ExitStack], tuple[str, str]]) -> NoReturn:
    """Run a launcher: parse flags, `build`, print the ready line, serve until a signal, close, exit.

    `build` puts on the stack whatever must be closed, and returns the role's name and address.
    """

    def main(_: Sequence[str]) -> None:
        sys.exit(_serve(build))

    run_main(main)


def run_main(main: Callable[[Sequence[str]], object], *, num_arguments: int = 0) -> NoReturn:
    """`absl.app.run` with our exit codes: a bad flag or a UsageError is one line and exit 2, a signal is one line and
    the code that a shell gives it.

    `num_arguments`: how many arguments besides flags there may be.
    """

    def guarded(argv: Sequence[str]) -> object:
        try:
            return main(argv)
        except UsageError as error:
            print(f"{_program()}: {error}", file=sys.stderr)
            return EXIT_USAGE
        except (KeyboardInterrupt, _Stop) as stop:
            print(f"{_program()}: stopped", file=sys.stderr)
            return stop.exit_code if isinstance(stop, _Stop) else 128 + signal.SIGINT

    absl_logging.set_verbosity(absl_logging.WARNING)
    app.run(guarded, flags_parser=partial(_parse, num_arguments))
    sys.exit(0)


def stop_on_signals(close_seconds: float = CLOSE_SECONDS) -> None:
    """From now on SIGTERM and SIGINT raise `_Stop` once in the main thread; further ones are ignored.

    `close_seconds`: for what it takes to end; the process is killed then.
    """
    _end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, partial(_stop, close_seconds))


def stoppable(serve: Callable[[], None], close_seconds: float = CLOSE_SECONDS) -> bool:
    """Run `serve` until it returns or a signal comes; then it has `close_seconds` for its `finally`s.

    Returns whether it was a signal.
    """
    stop_on_signals(close_seconds)
    try:
        serve()
    except _Stop as stop:
        log.info("stopped by %s", stop)
        return True
    return False


def wait_for_signal() -> NoReturn:
    """Return never: the next signal raises `_Stop` here.

    By a wakeup pipe, because a signal that comes just before `signal.pause()` would be slept over.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send)
    while True:
        os.read(receive, 1)


def set_cores(cores: Sequence[int]) -> None:
    """Pin this process, before jax starts its threads. Raises UsageError for cores that are not there."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        have = sorted(os.sched_getaffinity(0))
        raise UsageError(
            f"--cores={','.join(map(str, cores))}: {error}; this process may use {have}"
        ) from None


def _serve(build: Callable[[ExitStack], tuple[str, str]]) -> int:
    logging.basicConfig(
        force=True, level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("absl").setLevel(logging.WARNING)

    def serve() -> None:
        with ExitStack() as stack:
            name, address = build(stack)
            print(f"ready {name} {address}", flush=True)
            wait_for_signal()

    try:
        stoppable(serve)
    except (OSError, StoreError) as error:
        print(f"{_program()}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _parse(num_arguments: int, argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        print(f"{_program()}: {error} (try --help)", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    if len(rest) > 1 + num_arguments:
        print(
            f"{_program()}: unexpected argument {rest[1 + num_arguments]!r}; flags begin with -- (try --help)",
            file=sys.stderr,
        )
        sys.exit(EXIT_USAGE)
    return rest


def _program() -> str:
    module = sys.modules["__main__"].__spec__
    return f"python -m {module.name}" if module else sys.argv[0]


def _stop(close_seconds: float, number: int, _: FrameType | None) -> None:
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, close_seconds)
    raise _Stop(number)


def _end_with_parent() -> None:
    """Linux sends this process SIGTERM when the thread that started it ends, however it ends."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(EXIT_FAILED)

"""The supervisor with real processes: restarts, refusals, and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launch import supervisor as module
from launch.process import CLOSE_SECONDS
from launch.supervisor import (
    END_SECONDS,
    GRACE_SECONDS,
    Command,
    Supervisor,
    SupervisorError,
    backoff_seconds,
)

DUMMY = str(Path(__file__).parent / "dummy_role.py")
ROOT = Path(__file__).parents[2]


def dummy(name, kind="good", **options):
    return Command(name, (DUMMY, f"--name={name}", f"--kind={kind}"), **options)


def wait_for(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(pid):
    """Ended, and not left as a zombie of ours."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def supervisor(tmp_path):
    with Supervisor(tmp_path, grace_seconds=20) as supervisor:
        yield supervisor


def test_starts_and_closes_gracefully(tmp_path):
    with Supervisor(tmp_path, grace_seconds=20) as supervisor:
        supervisor.start(dummy("a"))
        supervisor.start(dummy("b"))
        seen = []
        addresses = supervisor.wait_ready(["a", "b"], 30, lambda name, address: seen.append((name, address)))
        assert dict(seen) == addresses
        pids = [supervisor.pid("a"), supervisor.pid("b")]
        assert addresses["a"] == f"127.0.0.1:{pids[0]}"
    assert all(gone(pid) for pid in pids)
    assert "closed" in (tmp_path / "a.log").read_text().splitlines(), "it was not closed, but killed"
    supervisor.close()  # again


def test_a_killed_child_comes_back(supervisor):
    supervisor.start(dummy("a"))
    supervisor.start(dummy("b", keeps_port=True))
    before = supervisor.wait_ready(["a", "b"], 30)
    for name in before:
        supervisor.signal(name, signal.SIGKILL)
    wait_for(lambda: all(supervisor.num_starts(name) == 2 for name in before), "not restarted")
    after = supervisor.wait_ready(["a", "b"], 30)
    assert after["a"] != before["a"]
    assert after["b"] == before["b"], "the port was not kept"


def test_leftovers_of_a_killed_child_are_removed(supervisor, tmp_path):
    supervisor.start(dummy("a", "litter"))
    supervisor.wait_ready(["a"], 30)
    pid = supervisor.pid("a")
    sleeper = int((tmp_path / "a.log").read_text().split()[1])
    assert Path(f"/dev/shm/mooncake-{pid}-0-dummy").exists()
    supervisor.signal("a", signal.SIGKILL)
    wait_for(lambda: gone(sleeper), "a grandchild is left")
    wait_for(lambda: not Path(f"/dev/shm/mooncake-{pid}-0-dummy").exists(), "shared memory is left")


def test_close_leaves_no_grandchild_and_no_shared_memory(tmp_path):
    with Supervisor(tmp_path, grace_seconds=20) as supervisor:
        supervisor.start(dummy("a", "litter"))
        supervisor.wait_ready(["a"], 30)
        pid = supervisor.pid("a")
        sleeper = int((tmp_path / "a.log").read_text().split()[1])
    assert gone(pid)
    wait_for(lambda: gone(sleeper), "a grandchild is left")
    assert not list(Path("/dev/shm").glob(f"mooncake-{pid}-*"))


def test_who_ignores_sigterm_is_killed(tmp_path):
    with Supervisor(tmp_path, grace_seconds=0.2) as supervisor:
        supervisor.start(dummy("a", "stubborn"))
        supervisor.wait_ready(["a"], 30)
        pid = supervisor.pid("a")
    assert gone(pid)


def test_who_is_stopped_is_ended_too(tmp_path):
    with Supervisor(tmp_path, grace_seconds=20) as supervisor:
        supervisor.start(dummy("a"))
        supervisor.wait_ready(["a"], 30)
        pid = supervisor.pid("a")
        supervisor.signal("a", signal.SIGSTOP)
    assert gone(pid)


def test_a_child_is_closed_while_it_still_builds(tmp_path):
    with Supervisor(tmp_path, grace_seconds=20) as supervisor:
        supervisor.start(dummy("a", "slow"))
        wait_for(
            lambda: (tmp_path / "a.log").exists() and "building" in (tmp_path / "a.log").read_text(), "slow"
        )
    assert "closed in the middle" in (tmp_path / "a.log").read_text()


def test_bad_usage_is_not_tried_again(supervisor, tmp_path):
    supervisor.start(dummy("a", "usage"))
    with pytest.raises(SupervisorError, match="--model=/nowhere is not a model: give a checkpoint"):
        supervisor.wait_ready(["a"], 30)
    assert supervisor.num_starts("a") == 1
    assert len((tmp_path / "a.log").read_text().splitlines()) == 1, "more than one line"


def test_a_crash_is_tried_three_times(supervisor, monkeypatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    supervisor.start(dummy("a", "crash"))
    with pytest.raises(SupervisorError, match="the disk is on fire"):
        supervisor.wait_ready(["a"], 60)
    assert supervisor.num_starts("a") >= 3


def test_a_late_child_is_named(supervisor):
    supervisor.start(dummy("a", "slow"))
    with pytest.raises(SupervisorError, match=r"not ready after 0\.1 s: a"):
        supervisor.wait_ready(["a"], 0.1)


def test_a_name_is_taken_once(supervisor):
    supervisor.start(dummy("a"))
    with pytest.raises(ValueError, match="name is taken"):
        supervisor.start(dummy("a"))


def test_backoff_grows_to_a_limit():
    assert [backoff_seconds(n) for n in (1, 2, 3, 6, 20)] == [0.25, 0.5, 1.0, 8.0, 8.0]


@contextlib.contextmanager
def parent_of(run_dir, kind, supervisor="", stoppable=""):
    """A process that runs a supervisor with one child, and the child's pid; the arguments are source code."""
    program = textwrap.dedent(
        f"""
        from pathlib import Path
        from launch.process import stoppable, wait_for_signal
        from launch.supervisor import Command, Supervisor

        def serve():
            with Supervisor(Path({str(run_dir)!r}), {supervisor}) as supervisor:
                supervisor.start(Command("a", ({DUMMY!r}, "--name=a", "--kind={kind}")))
                supervisor.wait_ready(["a"], 30)
                print(supervisor.pid("a"), flush=True)
                wait_for_signal()

        stoppable(serve, {stoppable})
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout
        yield parent, int(parent.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_children_end_with_their_parent(tmp_path, number):
    """Ctrl-C, or even SIGKILL: the children do not outlive the process that runs the supervisor."""
    with parent_of(tmp_path, "litter") as (parent, pid):
        parent.send_signal(number)
        code = parent.wait(30)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    wait_for(lambda: gone(pid), "the child outlived its parent")
    sleeper = int((tmp_path / "a.log").read_text().split()[1])
    if number != signal.SIGKILL:
        wait_for(lambda: gone(sleeper), "a grandchild is left")
    else:
        os.kill(sleeper, signal.SIGKILL)
    for path in Path("/dev/shm").glob(f"mooncake-{pid}-*"):
        path.unlink()
        assert number == signal.SIGKILL, "shared memory is left"


def test_a_parent_waits_for_a_child_that_takes_all_the_time_it_has(tmp_path):
    """Such as one that compiles when Ctrl-C comes: it is killed when its grace is over, and its memory is removed."""
    with parent_of(tmp_path, "busy", "grace_seconds=1.0", "20.0") as (parent, pid):
        parent.send_signal(signal.SIGINT)
        code = parent.wait(30)
    assert code == 0, "its own alarm ended it"
    assert gone(pid)
    assert not list(Path("/dev/shm").glob(f"mooncake-{pid}-*")), "shared memory is left"


def test_each_has_time_for_those_below_it():
    assert CLOSE_SECONDS < GRACE_SECONDS < END_SECONDS
    for launcher in ("cluster", "demo"):
        assert "stoppable(serve, END_SECONDS)" in (ROOT / "launch" / f"{launcher}.py").read_text()


def test_a_start_that_the_system_refuses_is_tried_again(supervisor, monkeypatch):
    refusals = [OSError(11, "Resource temporarily unavailable")]
    popen = subprocess.Popen

    def refusing(*args, **kwargs):
        if refusals:
            raise refusals.pop()
        return popen(*args, **kwargs)

    monkeypatch.setattr(module.subprocess, "Popen", refusing)
    supervisor.start(dummy("a"))
    assert "a" in supervisor.wait_ready(["a"], 30)
    assert not refusals

import os
import subprocess
import sys

import pytest

from launch import huge_pages


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.hugetlb=1", "glibc.malloc.hugetlb=1"),
    ],
)
def test_the_wish_is_added_once_and_a_users_own_stays(before, after):
    assert huge_pages.asking(before) == after


@pytest.mark.parametrize(
    ("setting", "asked"), [("always [madvise] never", True), ("[always] madvise never", False)]
)
def test_a_program_starts_again_in_the_same_process_with_its_arguments(tmp_path, setting, asked):
    kernel = tmp_path / "enabled"
    kernel.write_text(setting)
    script = tmp_path / "program.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "from launch import huge_pages\n"
        f"huge_pages._THP = pathlib.Path({str(kernel)!r})\n"
        "print('start', os.getpid(), *sys.argv[1:], os.environ.get('GLIBC_TUNABLES'), flush=True)\n"
        "huge_pages.use_huge_pages()\n"
        "print('go on', os.getpid(), flush=True)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != huge_pages.TUNABLES}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, script, "--a=1", "b c"], env=env, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    pid = lines[0].split()[1]
    starts = [f"start {pid} --a=1 b c None"] + [f"start {pid} --a=1 b c glibc.malloc.hugetlb=1"] * asked
    assert lines == [*starts, f"go on {pid}"]

"""Huge pages for the arrays that XLA allocates: with pages of 4 KiB, a step on the CPU is slowed down by its page table."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
_ASK = "glibc.malloc.hugetlb=1"  # malloc marks what it maps with MADV_HUGEPAGE; C libraries other than glibc ignore it
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def asking(tunables: str) -> str:
    """`tunables` (a value of GLIBC_TUNABLES) with the wish for huge pages, unless they say something about it."""
    if _ASK.partition("=")[0] in tunables:
        return tunables
    return f"{tunables}:{_ASK}" if tunables else _ASK


def use_huge_pages() -> None:
    """Start this program again, in the same process, with a malloc that asks for huge pages.

    Processes that it starts inherit the wish. Does nothing where the environment has it already, or where the kernel
    gives huge pages to everyone or to no one. Call it first: what the program has done until then is lost.
    """
    tunables = os.environ.get(TUNABLES, "")
    try:
        is_on_request = "[madvise]" in _THP.read_text()
    except OSError:
        return
    if is_on_request and asking(tunables) != tunables:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, os.environ | {TUNABLES: asking(tunables)})

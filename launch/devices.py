"""The devices that an engine of this process computes on."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax

from launch.process import UsageError

_MOST_CPU_DEVICES = 8
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: quota and period in microseconds
log = logging.getLogger(__name__)


def check_xla_flags() -> None:
    """XLA takes XLA_FLAGS that do not begin with a hyphen for the name of a file of flags, and ends the process for flags
    that it does not know. Raises UsageError for what is neither; the roles add none of their own."""
    text = os.environ.get("XLA_FLAGS", "")
    if Path(text).is_file():
        return
    for word in text.split():
        if not word.startswith("--") or not word.isascii():
            raise UsageError(f"XLA_FLAGS: {word!r} is no flag: expected --xla_NAME=VALUE, with plain hyphens")


def cpu_devices(num_cores: int) -> int:
    """How many devices XLA:CPU is to make of so many cores: a power of two.

    One thread per device keeps what a step writes in the caches of the core that reads it next; a pool of
    threads on one device hands it from core to core.
    """
    return min(_MOST_CPU_DEVICES, 1 << (max(1, num_cores).bit_length() - 1))


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, or its container's quota where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def compute_devices(num_devices: int = 0) -> list[Any]:
    """`num_devices` of this process's; 0: all cores that it may use, as `jax.Device`s, on the CPU, else the first
    accelerator. There may be fewer.

    Call it before anything computes: JAX makes its devices once. Too late, it takes those that are there and says so.
    Raises UsageError for XLA_FLAGS that are none.
    """
    check_xla_flags()
    wanted = num_devices or cpu_devices(usable_cores())
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.local_device_count() != wanted:
            log.warning(
                "JAX runs already: it computes on %d devices, not on %d", jax.local_device_count(), wanted
            )
    devices = jax.local_devices()
    if num_devices:
        return devices[:num_devices]
    return devices if jax.default_backend() == "cpu" else devices[:1]

"""The devices that an engine of this process computes on."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

_MOST_CPU_DEVICES = 8


def cpu_devices(num_cores: int) -> int:
    """How many devices XLA:CPU is to make of so many cores: a power of two.

    One thread per device keeps what a step writes in the caches of the core that reads it next; a pool of
    threads on one device hands it from core to core.
    """
    return min(_MOST_CPU_DEVICES, 1 << (max(1, num_cores).bit_length() - 1))


def compute_devices() -> list[Any]:
    """All cores that this process may use, as devices, on the CPU; else the first accelerator.

    The first call of a process decides, if nothing has used JAX before.
    """
    with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices it has
        jax.config.update("jax_num_cpu_devices", cpu_devices(len(os.sched_getaffinity(0))))
    devices = jax.local_devices()
    return devices if jax.default_backend() == "cpu" else devices[:1]

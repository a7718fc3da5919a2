"""Ahead-of-time programs, and the count of every compilation in this process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from models import platform as platforms

# also sent when the persistent cache had the executable
_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts new executables of this process: jitted, ahead of time, eager, from the persistent cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def total(self) -> int:
        with self._lock:
            return self._total

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            with self._lock:
                self._total += 1


@functools.cache
def process_compiles() -> CompileCounter:
    """The one counter of this process; it counts from its first use on."""
    return CompileCounter()


def program(
    step: Callable[..., Any], *args: Any, donate: Sequence[int] = (), out_shardings: Any = None
) -> Callable[..., Any]:
    """Compile `step` for arguments like `args` (arrays or shapes), with the platform's compiler options; the result takes
    only such shapes and shardings."""
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None)), args
    )
    jitted = jax.jit(
        step,
        donate_argnums=tuple(donate),
        out_shardings=out_shardings,
        compiler_options=dict(platforms.current().compiler_options),
    )
    return jitted.lower(*shapes).compile()


def buckets(smallest: int, largest: int) -> list[int]:
    """Powers of two times `smallest` below `largest`, and `largest`."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 2
    return [*sizes, largest]


def binary_runs(count: int, longest: int) -> list[int]:
    """Cut `count` into runs of `longest` and of powers of two below it: few programs serve every count."""
    runs = [longest] * (count // longest)
    rest = count % longest
    return runs + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def use_persistent_cache(directory: str) -> None:
    """Keep compiled programs in `directory`, whatever their size: the next process starts in seconds."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

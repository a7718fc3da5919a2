"""Puts `tests/` on the path, so that tests can import `fakes` and `e2e`."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parent)
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # some tests compute on several

from e2e.real import compile_cache, engines, oracle  # noqa: E402, F401  fixtures of every test

"""Fetch SmolLM2-135M-Instruct into the user's cache, and print where it is.

    python -m launch.fetch

Nothing is downloaded once it is there.
"""

from __future__ import annotations

import sys

from launch.model_cache import FetchError, smollm2_gguf
from launch.process import run_main, stop_on_signals


def main(_: object) -> None:
    stop_on_signals()
    try:
        print(smollm2_gguf())
    except FetchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run_main(main)

"""Fetch SmolLM2-135M-Instruct into the user's cache, and print where it is.

    python -m launch.fetch

Nothing is downloaded once it is there.
"""

from __future__ import annotations

import sys

from absl import app

from launch.model_cache import FetchError, smollm2_gguf


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        print(smollm2_gguf())
    except FetchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)

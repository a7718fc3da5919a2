"""Convert a model to our checkpoint format, which every role loads.

    python -m launch.convert --source=model.gguf --target=my-model --dtype=bfloat16
    python -m launch.convert                            (SmolLM2-135M-Instruct, into the user's cache)

The source is a GGUF file, a Hugging Face folder (safetensors) or a checkpoint of ours; docs/models.md says which
models and types. A bar shows how far reading is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import flags

from launch.model_cache import FetchError, convert, smollm2_checkpoint
from launch.process import UsageError, run_main, stop_on_signals
from models.checkpoint import CheckpointError
from models.llama import DTYPES


def main(_: object) -> None:
    source, target, dtype = flags.FLAGS.source, flags.FLAGS.target, flags.FLAGS.dtype
    if bool(source) != bool(target):
        raise UsageError("give --source and --target, or neither for SmolLM2-135M-Instruct")
    stop_on_signals()  # no half of a checkpoint is left
    try:
        if source:
            convert(Path(source), Path(target).absolute(), dtype)
        print(target or smollm2_checkpoint(dtype))
    except (CheckpointError, FetchError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.DEFINE_string("source", "", "GGUF file, Hugging Face folder or checkpoint to read.")
    flags.DEFINE_string("target", "", "Folder to write; must not exist.")
    flags.DEFINE_enum("dtype", "bfloat16", sorted(DTYPES), "Type of the written weights.")
    run_main(main)

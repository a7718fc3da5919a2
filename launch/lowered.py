"""Lower the steps of a real size for CUDA, and print what lies on one device: nothing is computed, no GPU is needed.

    python -m launch.lowered --model=llama3-70b --prefill_mesh=stage:4,tensor:2 --decode_mesh=tensor:8    # 1 min

'Lowered' is not 'runs': XLA makes the last steps on the GPU. Bytes of parameters, KV and activations between steps are
exact from the shardings; temporaries are estimated (`models.lowering`).
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from launch.process import UsageError, run_main
from models.config import PRESETS

_MODEL = flags.DEFINE_enum("model", "llama3-70b", sorted(PRESETS), "Shapes to lower, in bfloat16.")
_PREFILL = flags.DEFINE_string("prefill_mesh", "stage:4,tensor:2", "Devices of a prefill instance.")
_DECODE = flags.DEFINE_string("decode_mesh", "tensor:8", "Devices of a decode instance.")
_CHUNK = flags.DEFINE_integer("chunk", 8192, "Tokens of a prefill chunk.", 1)
_PROMPTS = flags.DEFINE_integer("prompts", 2, "Prompts in a prefill instance's caches at a time.", 1)
_PROMPT = flags.DEFINE_integer("prompt", 131_072, "Tokens of the longest prompt.", 1)
_BATCH = flags.DEFINE_integer("batch", 32, "Requests of a decode batch.", 1)
_CONTEXT = flags.DEFINE_integer("context", 8192, "Tokens of the longest prompt and answer in decode.", 1)
_EXPORT = flags.DEFINE_bool("export", True, "Lower; otherwise print the memory table alone.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}")
    from models import lowering
    from models.platform import ACCELERATOR
    from models.sharding import MeshShape

    cfg, dtype = PRESETS[_MODEL.value], "bfloat16"
    try:
        shapes = [MeshShape.parse(text) for text in (_PREFILL.value, _DECODE.value)]
        for shape in shapes:
            shape.check(cfg)
        before, after = (shape.abstract() for shape in shapes)
        prefill = lowering.prefill_tick(
            cfg,
            ACCELERATOR,
            before,
            dtype=dtype,
            chunk_tokens=_CHUNK.value,
            num_slots=_PROMPTS.value,
            max_tokens=_PROMPT.value,
        )
        decode = lowering.decode_group(
            cfg, ACCELERATOR, after, dtype=dtype, batch=_BATCH.value, max_tokens=_CONTEXT.value
        )
        heads = [
            lowering.head(cfg, ACCELERATOR, mesh, dtype=dtype, rows=rows)
            for mesh, rows in ((before, 1), (after, _BATCH.value))
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    memory = {
        f"{prefill.name}, {_PROMPTS.value} prompts of {_PROMPT.value}, chunks of {_CHUNK.value}": (
            lowering.prefill_memory(cfg, ACCELERATOR, prefill, heads[0])
        ),
        f"{decode.name}, {_BATCH.value} requests of {_CONTEXT.value}": (
            lowering.decode_memory(cfg, ACCELERATOR, decode, heads[1])
        ),
    }
    print(f"{_MODEL.value}, GB on one device (estimate)\n")
    print("| | parameters | KV | between steps | temporaries | total |\n|---|--:|--:|--:|--:|--:|")
    for name, one in memory.items():
        parts = (one.parameters, one.kv, one.activations, one.temporaries, one.total)
        print(f"| {name} | " + " | ".join(f"{nbytes / 1e9:.2f}" for nbytes in parts) + " |")
    if _EXPORT.value:
        for step in (prefill, decode, *heads):
            lowered = step.export()
            print(f"lowered for {', '.join(lowered.platforms)}: {step.name}, {lowered.nr_devices} devices")


if __name__ == "__main__":
    run_main(main)

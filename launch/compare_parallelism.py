"""CPP against tensor and sequence parallelism across X nodes: bytes, collectives, bubbles, modelled TTFT and MFU.

    python -m launch.compare_parallelism --csv=build/cpp_vs_tp_vs_sp.csv      # 1 min

Bytes and collectives are counted in compiled steps of the model's width on forced CPU devices, one of which stands for
a node; bubbles are counted by ticks; TTFT and MFU are modelled from the node's cost model, and labelled so. Claim of
the paper (section 5.1): CPP needs the network only at the boundaries of stages, and keeps short prompts cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from tqdm import tqdm

from launch.process import UsageError, run_main
from models.config import PRESETS

_MODEL = flags.DEFINE_enum("model", "llama3-70b", sorted(PRESETS), "Whose width is compiled and costs are.")
_COSTS = flags.DEFINE_string("cost_model", "a800_llama3_70b", "Of a node: a name or a JSON file.")
_PROMPTS = flags.DEFINE_list("prompts", ["8", "16", "32", "64", "128"], "Thousands (1,024) of tokens.")
_NODES = flags.DEFINE_list("nodes", ["1", "2", "4", "8"], "Nodes that compute a prompt together.")
_CHUNK = flags.DEFINE_integer("chunk", 2048, "Tokens of a chunk.", 256)
_NODE_TFLOPS = flags.DEFINE_float("node_tflops", 8 * 312.0, "Peak of a node, for MFU (8 A800: 2,496).", 1.0)
_CSV = flags.DEFINE_string("csv", "build/cpp_vs_tp_vs_sp.csv", "File to write.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}")
    import jax

    from launch import rivals
    from mooncake_jax.cost_model import CostModelFile

    cfg, costs = PRESETS[_MODEL.value], CostModelFile.load(_COSTS.value).costs
    try:
        nodes, prompts = [int(n) for n in _NODES.value], [1024 * int(p) for p in _PROMPTS.value]
    except ValueError as error:
        raise UsageError(f"--nodes and --prompts are lists of numbers: {error}") from None
    jax.config.update("jax_num_cpu_devices", max(nodes))
    devices = jax.devices("cpu")
    pairs: list[tuple[rivals.Kind, int]] = [(kind, n) for n in nodes for kind in rivals.KINDS]
    try:
        crossings = [
            rivals.crossing(cfg, kind, n, devices)
            for kind, n in tqdm(pairs, desc="compiling", unit="step", file=sys.stderr, disable=None)
        ]
    except ValueError as error:
        raise UsageError(f"--nodes={','.join(_NODES.value)}: {error}") from error
    outcomes = [
        rivals.outcome(cfg, costs, one, prompt, _CHUNK.value, _NODE_TFLOPS.value * 1e12, balanced=balanced)
        for prompt in prompts
        for one in crossings
        for balanced in ((False, True) if one.kind == "CPP" and one.num_nodes > 1 else (False,))
    ]
    print(f"{_MODEL.value}, nodes of {_COSTS.value}; TTFT and MFU modelled, the rest counted\n")
    print(
        "| X | | collectives a layer and chunk | bytes a token and layer, sent by a node |\n|--:|---|--:|--:|"
    )
    for one in crossings:
        print(
            f"| {one.num_nodes} | {one.kind} | {one.collectives_per_layer:.2f} | {one.nbytes_per_token_and_layer:.0f} |"
        )
    print(f"\n{rivals.table(outcomes)}\n")
    mix = [128 * 1024, *[2 * 1024] * 8] * 4
    for n in nodes:
        kept, drained = (
            rivals.queue_bubbles(mix, _CHUNK.value, n, drained=drained) for drained in (False, True)
        )
        print(f"4 x (128 k and eight 2 k prompts) queued, X = {n}: bubbles {kept:.1%}, drained {drained:.1%}")
    rivals.write_csv(Path(_CSV.value), outcomes)


if __name__ == "__main__":
    run_main(main)

"""Measure what prefill and decode cost on this machine, and write the cost model that the Conductor forecasts with.

    python -m launch.profile --out=cost.json                  # SmolLM2-135M-Instruct; or --model=CHECKPOINT
    python -m launch.conductor --directory=HOST:PORT --cost_model=cost.json

Give it the --cores that an instance will have. Every time is a median of --repeats, taken in random order between runs
of one fixed probe: a machine that is slow for a while is slow for the probe too, and the time is scaled by that.
Printed: R² of the fit, and the relative errors on points that it has not seen, measured afterwards in a run of their own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from absl import flags
from tqdm import tqdm

from launch.flags import define, keep_compiled_programs, pin_to_cores
from launch.huge_pages import use_huge_pages
from launch.process import UsageError, run_main
from mooncake_jax.conductor.fit import (
    DecodePoint,
    Fit,
    PrefillPoint,
    decode_columns,
    fit_nonnegative,
    prefill_columns,
    quality,
)
from mooncake_jax.cost_model import Constant, CostModelFile

if TYPE_CHECKING:
    from mooncake_jax.engine.contract import DecodeEngine, PrefillEngine

PROBE_TOKENS = 128
PREFIX_SHARES = (0.0, 0.3, 0.6, 0.9)
TRANSFER_NBYTES = 64 << 20
NUM_STEPS = 8
Point = TypeVar("Point", PrefillPoint, DecodePoint)


def prefill_grid(longest: int, num_lengths: int, block_tokens: int) -> list[PrefillPoint]:
    """Lengths that grow by a constant factor up to `longest`, each with several shares reused; no times yet."""
    lengths = np.geomspace(min(32, longest), longest, num_lengths).astype(int)
    sizes = {
        (int(n), int(n * share) // block_tokens * block_tokens) for n in lengths for share in PREFIX_SHARES
    }
    return [PrefillPoint(n, p, 0.0) for n, p in sorted(sizes)]


def prefill_draws(longest: int, num_points: int, block_tokens: int, seed: int) -> list[PrefillPoint]:
    """Random lengths and prefixes; no times yet."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(min(32, longest)), np.log(longest), num_points)).astype(int)
    shares = rng.uniform(0.0, 1.0, num_points)
    return [
        PrefillPoint(n, int(share * n) // block_tokens * block_tokens, 0.0)
        for n, share in zip(lengths.tolist(), shares.tolist(), strict=True)
    ]


def measure(
    points: Sequence[Point],
    run: Callable[[Point], float],
    probe: Callable[[], float],
    *,
    repeats: int,
    label: str,
) -> list[Point]:
    """`points` with the median of `repeats` runs, each scaled by how fast the probe was just before and after it."""
    probes, times = [probe()], [[] for _ in points]
    rng = np.random.default_rng(0)
    order = [int(i) for _ in range(repeats) for i in rng.permutation(len(points))]
    scaled: list[tuple[int, float, int]] = []
    for index in tqdm(order, desc=label, file=sys.stderr, disable=None):
        seconds = run(points[index])
        probes.append(probe())
        scaled.append((index, seconds, len(probes) - 1))
    usual = statistics.median(probes)
    for index, seconds, after in scaled:
        times[index].append(seconds * 2.0 * usual / (probes[after - 1] + probes[after]))
    return [
        point._replace(seconds=statistics.median(values)) for point, values in zip(points, times, strict=True)
    ]


def report(label: str, fit: Fit, columns: np.ndarray, points: Sequence[PrefillPoint | DecodePoint]) -> str:
    """One line on how `fit` does on `points`."""
    got = quality(fit.predict(columns), np.array([point.seconds for point in points]))
    return (
        f"{label}: {got.num_points} points, R² {got.r_squared:.4f}, "
        f"relative error p50 {got.error_p50:.1%}, p95 {got.error_p95:.1%}"
    )


def measure_transfer() -> tuple[float, float]:
    """Seconds of a small read from another host's memory over loopback TCP, and bytes per second of a large one."""
    from kvstore.transfer import TransferEngine
    from kvstore.transfer.request import Opcode, TransferRequest

    here, there = TransferEngine(host_id="profile-here"), TransferEngine(host_id="profile-there")
    try:
        local, remote = np.ones(TRANSFER_NBYTES, np.uint8), np.ones(TRANSFER_NBYTES, np.uint8)
        here.register_local_memory(local, name="local")
        segment = there.register_local_memory(remote, name="remote")

        def seconds(nbytes: int) -> float:
            start = time.perf_counter()
            here.transfer([TransferRequest(Opcode.READ, local.data[:nbytes], segment, 0)], timeout_seconds=60)
            return time.perf_counter() - start

        small = statistics.median(seconds(4096) for _ in range(20))
        large = statistics.median(seconds(TRANSFER_NBYTES) for _ in range(7))
        return small, TRANSFER_NBYTES / max(large - small, 1e-9)
    finally:
        here.close()
        there.close()


class Profile:
    """The measurements of one machine and model."""

    def __init__(self, prefill: PrefillEngine, decode: DecodeEngine, *, longest: int, repeats: int):
        from launch.benchmarks.engine import decode_seconds, prefill_seconds

        self._prefill, self._decode = prefill, decode
        self._longest, self._repeats = longest, repeats
        self._run_prefill = lambda point: prefill_seconds(prefill, point.num_tokens, point.num_prefix)
        self._probe = lambda: prefill_seconds(prefill, min(PROBE_TOKENS, longest))
        self._run_decode = lambda point: (
            decode_seconds(decode, point.batch, point.kv_tokens // point.batch, NUM_STEPS) / NUM_STEPS
        )

    def prefill(self, points: Sequence[PrefillPoint], label: str) -> list[PrefillPoint]:
        return measure(points, self._run_prefill, self._probe, repeats=self._repeats, label=label)

    def decode(self, points: Sequence[DecodePoint], label: str) -> list[DecodePoint]:
        return measure(points, self._run_decode, self._probe, repeats=self._repeats, label=label)

    def decode_points(self, contexts: Sequence[int]) -> list[DecodePoint]:
        """Every batch that the engine compiles, at each of `contexts`; no times yet."""
        batches = {1 << i for i in range(self._decode.num_slots.bit_length())}
        longest = min(self._longest, self._decode.max_tokens) - NUM_STEPS
        return [
            DecodePoint(batch, batch * min(context, longest), 0.0)
            for batch in sorted(batches)
            for context in contexts
        ]


def constants(
    prefill: Fit,
    decode: Fit,
    transfer: tuple[float, float],
    *,
    kv_nbytes: float,
    dram_nbytes: float,
    slots: float,
) -> dict[str, Constant]:
    """Of a `CostModelFile`; each says whether it was measured."""
    measured = "measured by launch.profile"
    base, per_token, per_pair, per_prefix_token = (float(value) for value in prefill.coefficients)
    step, per_request, per_kv_token = (float(value) for value in decode.coefficients)
    assumed = "not measured: no estimator of the Conductor uses it"
    return {
        "kv_nbytes_per_token": Constant(kv_nbytes, "the model's KV layout"),
        "prefill_base_seconds": Constant(base, measured),
        "prefill_seconds_per_token": Constant(per_token, measured),
        "prefill_seconds_per_pair": Constant(per_pair, measured),
        "prefill_seconds_per_prefix_token": Constant(per_prefix_token, measured),
        "load_nbytes_per_second": Constant(
            kv_nbytes / max(per_prefix_token, kv_nbytes * 1e-15),
            "kv_nbytes / prefill_seconds_per_prefix_token",
        ),
        "ssd_nbytes_per_second": Constant(5e8, assumed),
        "nic_nbytes_per_second": Constant(transfer[1], f"{measured}, TCP over loopback"),
        "transfer_base_seconds": Constant(transfer[0], f"{measured}, TCP over loopback"),
        "scheduling_seconds": Constant(1e-3, assumed),
        "decode_base_seconds": Constant(step, measured),
        "decode_seconds_per_extra_request": Constant(min(per_request, step), measured),
        "decode_seconds_per_kv_token": Constant(per_kv_token, measured),
        "dram_nbytes": Constant(dram_nbytes, "--dram_bytes"),
        "hbm_kv_nbytes": Constant(slots * kv_nbytes, "--decode_slots * --max_tokens"),
    }


if __name__ == "__main__":
    use_huge_pages()
    define("dtype", "max_tokens", "cores", "dram_bytes", "compile_cache")
    MODEL = flags.DEFINE_string(
        "model", "", "As --model of prefill; if empty, SmolLM2-135M-Instruct, fetched."
    )
    OUT = flags.DEFINE_string("out", None, "File to write the cost model to (JSON).", required=True)
    LONGEST = flags.DEFINE_integer("longest", 2048, "Longest prompt to measure, in tokens.", 64)
    LENGTHS = flags.DEFINE_integer("lengths", 7, "Prompt lengths of the grid that is fitted.", 4)
    HELD_OUT = flags.DEFINE_integer("held_out", 16, "Points to check the fit with.", 4)
    REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of each point; the median counts.", 1)
    DECODE_SLOTS = flags.DEFINE_integer("decode_slots", 8, "Largest decode batch.", 1)

    def main(_: object) -> None:
        pin_to_cores()
        from launch.benchmarks.record import Machine
        from launch.cluster import default_compile_cache
        from launch.devices import compute_devices
        from launch.instance import engine_arguments
        from launch.model_cache import FetchError, smollm2_checkpoint
        from launch.model_source import served_name
        from mooncake_jax.engine.jax_decode import JaxDecodeEngine
        from mooncake_jax.engine.jax_prefill import JaxPrefillEngine

        values = flags.FLAGS
        try:
            model = MODEL.value or str(smollm2_checkpoint(values.dtype))
        except FetchError as error:
            raise UsageError(str(error)) from None
        keep_compiled_programs(values.compile_cache or default_compile_cache())
        devices = compute_devices()
        arguments = engine_arguments(model, values.dtype, values.max_tokens, 1)
        longest = min(LONGEST.value, arguments["max_tokens"])
        prefill = JaxPrefillEngine(**arguments, devices=devices)
        decode = JaxDecodeEngine(**{**arguments, "num_slots": DECODE_SLOTS.value})
        for engine in (prefill, decode):
            engine.warm_up()

        profile, block = Profile(prefill, decode, longest=longest, repeats=REPEATS.value), prefill.format
        Z = block.block_tokens
        seen = profile.prefill(prefill_grid(longest, LENGTHS.value, Z), "prefill")
        steps = profile.decode(profile.decode_points((longest // 8, longest // 2, longest)), "decode")
        prefill_fit = fit_nonnegative(prefill_columns(seen), np.array([point.seconds for point in seen]))
        decode_fit = fit_nonnegative(decode_columns(steps), np.array([point.seconds for point in steps]))
        unseen = profile.prefill(prefill_draws(longest, HELD_OUT.value, Z, seed=1), "prefill, held out")
        unseen_steps = profile.decode(profile.decode_points((longest // 4,)), "decode, held out")

        lines = [
            report("prefill, fitted", prefill_fit, prefill_columns(seen), seen),
            report("prefill, held out", prefill_fit, prefill_columns(unseen), unseen),
            report("decode step, fitted", decode_fit, decode_columns(steps), steps),
            report("decode step, held out", decode_fit, decode_columns(unseen_steps), unseen_steps),
        ]
        machine = Machine.here()
        file = CostModelFile(
            name=served_name(model),
            kind="measured",
            description=f"{machine.cpu}, {machine.num_cores} cores, jax {machine.jax}, {values.dtype}; "
            + "; ".join(lines),
            constants=constants(
                prefill_fit,
                decode_fit,
                measure_transfer(),
                kv_nbytes=block.nbytes / Z,
                dram_nbytes=values.dram_bytes,
                slots=DECODE_SLOTS.value * arguments["max_tokens"],
            ),
        )
        Path(OUT.value).parent.mkdir(parents=True, exist_ok=True)
        file.write(OUT.value)
        print("\n".join([*lines, f"written: {OUT.value}"]))

    run_main(main)

"""Serve a trace on a simulated cluster: latencies, capacity, hit rates, bytes moved, GPU seconds.

    python -m launch.simulate --trace=conversation_trace.jsonl --cluster=8P8D --policy=global
    python -m launch.simulate --trace=generated:agent --requests=20000 --cluster=8P8D
    python -m launch.simulate --trace=conversation_trace.jsonl --sweep=4P12D,6P10D,8P8D,10P6D --ttft_slo=10 --tbt_slo=0.1
    python -m launch.simulate --trace=conversation_trace.jsonl --smallest=95 --ttft_slo=10 --tbt_slo=0.1

All it prints is simulated. `--sweep` compares splits, and every --threshold and --nic_gbps with them if several are
given; `--smallest` finds the fewest nodes, over all splits, that keep a percentage of requests within both SLOs.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
from absl import flags
from tqdm import tqdm

from kvstore.errors import InvalidError
from launch.process import UsageError, run_main
from mooncake_jax.conductor.policy import POLICIES, PolicyName
from mooncake_jax.cost_model import CostModelFile
from mooncake_jax.simulation import Cluster, ClusterConfig, State, Workload
from mooncake_jax.synthetic_trace import KINDS, KindName, generate
from mooncake_jax.trace import Trace, read_trace

_TRACE = flags.DEFINE_string(
    "trace",
    None,
    f"A trace in Mooncake's format, or generated:KIND with one of {', '.join(KINDS)}.",
    required=True,
)
_REQUESTS = flags.DEFINE_integer(
    "requests", 0, "The first so many requests, or as many as are generated (12,000 if 0); 0: all.", 0
)
_SECONDS = flags.DEFINE_float("seconds", 3600.0, "Over how long generated requests arrive.", 1.0)
_COPIES = flags.DEFINE_integer(
    "copies", 1, "So many copies of the trace arrive together, sharing nothing.", 1
)
_RATE = flags.DEFINE_float("rate", 1.0, "Requests come so many times as fast as the trace says.", 1e-6)
_CLUSTER = flags.DEFINE_string("cluster", "8P8D", "Prefill and decode nodes, such as 8P8D.")
_COST_MODEL = flags.DEFINE_string("cost_model", "a800_llama3_70b", "Of a node: a name or a JSON file.")
_POLICY = flags.DEFINE_enum("policy", "global", list(POLICIES), "Of the Conductor.")
_THRESHOLD = flags.DEFINE_list(
    "threshold", ["2"], "kvcache_balancing_threshold; several with --sweep; inf: never."
)
_NIC_GBPS = flags.DEFINE_list(
    "nic_gbps", ["0"], "Of a node; several with --sweep; 0: as the cost model says."
)
_SSD_TOKENS = flags.DEFINE_integer("ssd_tokens", 0, "Tokens of KV on the SSD of a prefill node.", 0)
_GROUP = flags.DEFINE_integer(
    "nodes_per_group", 1, "Nodes of a prefill instance (chunked pipeline parallelism).", 1
)
_TTFT_SLO = flags.DEFINE_float("ttft_slo", 30.0, "Seconds; counts effective requests.", 1e-6)
_TBT_SLO = flags.DEFINE_float("tbt_slo", 0.1, "Seconds; counts effective requests.", 1e-6)
_REJECT = flags.DEFINE_bool("reject", False, "The Conductor refuses what it forecasts to miss an SLO.")
_SWEEP = flags.DEFINE_list("sweep", [], "Splits to compare, such as 6P10D,8P8D.")
_SMALLEST = flags.DEFINE_float(
    "smallest", 0.0, "Find the smallest cluster with so many percent effective requests.", 0.0, 100.0
)
_MOST_NODES = flags.DEFINE_integer("most_nodes", 64, "Where --smallest gives up.", 2)
_SEED = flags.DEFINE_integer("seed", 0, "Of ties and of generated traces.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UsageError(f"unexpected argument {argv[1]!r}")
    try:
        trace = _trace()
        workload, file = Workload.of(trace, rate=_RATE.value), CostModelFile.load(_COST_MODEL.value)
        print(f"simulated, cost model {file.name} ({file.kind}); trace {trace.name}, {len(trace)} requests")
        if _SMALLEST.value:
            print(_smallest(workload, file))
        elif _SWEEP.value:
            print(_sweep(workload, file))
        else:
            print(
                _report(
                    _config(_CLUSTER.value, file, _one(_THRESHOLD.value), _one(_NIC_GBPS.value)), workload
                )
            )
    except (InvalidError, ValueError) as error:
        raise UsageError(str(error)) from error


def _trace() -> Trace:
    kind = _TRACE.value.removeprefix("generated:")
    if kind != _TRACE.value:
        trace = generate(cast(KindName, kind), _REQUESTS.value or 12_000, _SECONDS.value, _SEED.value)
    else:
        trace = read_trace(_TRACE.value, _REQUESTS.value or None)
    return trace.superposed(_COPIES.value) if _COPIES.value > 1 else trace


def _one(values: list[str]) -> float:
    if len(values) != 1:
        raise UsageError(f"several values ({', '.join(values)}) need --sweep")
    return float(values[0])


def _split(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)P(\d+)D", text)
    if match is None:
        raise UsageError(f"--cluster: {text!r}, expected prefill and decode nodes such as 8P8D")
    return int(match[1]), int(match[2])


def _config(split: str, file: CostModelFile, threshold: float, gbps: float) -> ClusterConfig:
    num_prefill, num_decode = _split(split)
    if num_prefill % _GROUP.value:
        raise UsageError(f"--nodes_per_group={_GROUP.value} does not divide {num_prefill} prefill nodes")
    return ClusterConfig(
        num_prefill=num_prefill // _GROUP.value,
        num_decode=num_decode,
        costs=file.costs,
        policy=cast(PolicyName, _POLICY.value),
        balancing_threshold=threshold,
        ttft_slo_seconds=_TTFT_SLO.value if _REJECT.value else 0.0,
        tbt_slo_seconds=_TBT_SLO.value if _REJECT.value else 0.0,
        nodes_per_group=_GROUP.value,
        ssd_tokens=_SSD_TOKENS.value,
        nic_nbytes_per_second=gbps * 1e9 / 8 or None,
        seed=_SEED.value,
    )


def _effective(config: ClusterConfig, workload: Workload) -> float:
    outcomes = Cluster(config, workload).run()
    return 100.0 * outcomes.effective(_TTFT_SLO.value, _TBT_SLO.value)


def _report(config: ClusterConfig, workload: Workload) -> str:
    start = time.perf_counter()
    cluster = Cluster(config, workload)
    outcomes = cluster.run()
    wall = time.perf_counter() - start
    done = outcomes.finished
    if not done.any():
        return f"none of {len(workload)} requests finished"
    lines = [
        f"{'finished / rejected / failed':<34}"
        + " / ".join(str(outcomes.count(state)) for state in (State.FINISHED, State.REJECTED, State.FAILED)),
        _percentiles("TTFT (s)", outcomes.ttft_seconds[done]),
        _percentiles("TBT, longest 10 % (ms)", 1000 * outcomes.tbt_seconds[done]),
        _percentiles("TBT, mean interval (ms)", 1000 * outcomes.mean_tbt_seconds[done]),
        f"{'effective requests':<34}{100 * outcomes.effective(_TTFT_SLO.value, _TBT_SLO.value):.2f} % "
        f"(TTFT {_TTFT_SLO.value:g} s, TBT {1000 * _TBT_SLO.value:g} ms)",
        f"{'tokens reused':<34}{100 * outcomes.hit_rate:.1f} %",
        f"{'moved between nodes':<34}{cluster.network.sent_nbytes / 1e12:.2f} TB "
        f"({config.costs.kv_nbytes(float(outcomes.fetched_tokens.sum())) / 1e12:.2f} TB of prefixes)",
        f"{'prefill GPU seconds a request':<34}{cluster.gpu_seconds / len(workload):.3f}",
        f"{'simulated in':<34}{wall:.2f} s, {len(workload) / wall:.0f} requests/s",
    ]
    return "\n".join(lines)


def _percentiles(name: str, values: np.ndarray) -> str:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return f"{name:<34}mean {values.mean():.3g}, p50 {p50:.3g}, p90 {p90:.3g}, p99 {p99:.3g}, max {values.max():.3g}"


def _sweep(workload: Workload, file: CostModelFile) -> str:
    points = list(itertools.product(_SWEEP.value, _THRESHOLD.value, _NIC_GBPS.value))
    configs = {point: _config(point[0], file, float(point[1]), float(point[2])) for point in points}
    lines = ["| cluster | threshold | NIC (Gbps) | effective % | mean TTFT (s) | mean TBT (ms) | reused % |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    best, best_effective = points[0], -1.0
    for point in tqdm(points, desc="sweep", file=sys.stderr, disable=None):
        outcomes = Cluster(configs[point], workload).run()
        effective = 100.0 * outcomes.effective(_TTFT_SLO.value, _TBT_SLO.value)
        tbt = outcomes.mean_tbt_seconds[outcomes.finished]
        lines.append(
            f"| {point[0]} | {point[1]} | {point[2] if point[2] != '0' else '–'} | {effective:.2f} | "
            f"{outcomes.mean_ttft_seconds:.2f} | {1000 * tbt.mean() if tbt.size else 0.0:.1f} | "
            f"{100 * outcomes.hit_rate:.1f} |"
        )
        if effective > best_effective:
            best, best_effective = point, effective
    return "\n".join([*lines, "", f"best: {best[0]}, threshold {best[1]}, {best_effective:.2f} % effective"])


def _smallest(workload: Workload, file: CostModelFile) -> str:
    """Sizes by bisection (more nodes are never worse); for each size, the splits from the middle outwards."""
    threshold, gbps = _one(_THRESHOLD.value), _one(_NIC_GBPS.value)
    progress = tqdm(desc="clusters tried", unit="", file=sys.stderr, disable=None)

    def reaches(num_nodes: int) -> str | None:
        for prefill in sorted(range(1, num_nodes), key=lambda prefill: abs(2 * prefill - num_nodes)):
            if prefill % _GROUP.value:
                continue
            split = f"{prefill}P{num_nodes - prefill}D"
            progress.update()
            if _effective(_config(split, file, threshold, gbps), workload) >= _SMALLEST.value:
                return split
        return None

    low, high, found = 1, 2, None
    while high <= _MOST_NODES.value and (found := reaches(high)) is None:
        low, high = high, high * 2
    if found is None:
        return f"no cluster of up to {_MOST_NODES.value} nodes keeps {_SMALLEST.value:g} % within both SLOs"
    while high - low > 1:
        middle = (low + high) // 2
        split = reaches(middle)
        if split is None:
            low = middle
        else:
            high, found = middle, split
    progress.close()
    return f"smallest: {high} nodes, {found} ({_SMALLEST.value:g} % within {_TTFT_SLO.value:g} s and {_TBT_SLO.value:g} s)"


if __name__ == "__main__":
    run_main(main)

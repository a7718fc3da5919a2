"""Suite `simulate`: how fast a simulated cluster serves a trace, policy global, on one core.

- `conversation_16`: 8 prefill and 8 decode nodes, the conversation trace (`--trace`, else one that is generated);
- `nodes_256`: 128 and 128 nodes, 16 copies of it (192,000 requests).

In requests per second of wall time; building the workload is not counted.
"""

from __future__ import annotations

import time

from launch.benchmarks.options import Options
from launch.benchmarks.record import Row, measure
from mooncake_jax.cost_model import CostModelFile
from mooncake_jax.simulation import Cluster, ClusterConfig, Workload
from mooncake_jax.synthetic_trace import generate
from mooncake_jax.trace import Trace, read_trace

ROWS = {"conversation_16": (8, 1), "nodes_256": (128, 16)}  # nodes of a role, copies of the trace
NUM_REQUESTS, QUICK_REQUESTS = 12_000, 300


def run(options: Options) -> list[Row]:
    rows = []
    for name, (num_nodes, copies) in ROWS.items():
        if options.wants(name):
            workload = Workload.of(_trace(options).superposed(copies))
            config = ClusterConfig(
                num_prefill=num_nodes, num_decode=num_nodes, costs=CostModelFile.load("a800_llama3_70b").costs
            )
            rows.append(
                measure(
                    name,
                    "requests/s",
                    "higher",
                    lambda config=config, workload=workload: _speed(config, workload),
                    rounds=options.rounds,
                )
            )
    return rows


def _trace(options: Options) -> Trace:
    limit = QUICK_REQUESTS if options.quick else None
    if options.trace:
        return read_trace(options.trace, limit)
    return generate("conversation", limit or NUM_REQUESTS, 3600.0)


def _speed(config: ClusterConfig, workload: Workload) -> float:
    cluster = Cluster(config, workload)
    start = time.perf_counter()
    cluster.run()
    return len(workload) / (time.perf_counter() - start)

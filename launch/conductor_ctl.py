"""Ask a running Conductor.

    python -m launch.conductor_ctl explain REQUEST_ID --conductor=127.0.0.1:9001
    python -m launch.conductor_ctl status --conductor=127.0.0.1:9001

`explain` shows why a request went where it went, as long as it is among the last decisions that the Conductor keeps:
per instance the prefix it holds, the queue, the forecasts, and what spoke against it. The id is the one of the answer.
`status` shows who is alive, what is booked, and how far forecasts were off.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from kvstore.errors import StoreError
from kvstore.rpc import Empty, Stub
from launch.process import UsageError, run_main
from mooncake_jax.conductor.explain import table
from mooncake_jax.messages import CONDUCTOR, ExplainRequest

USAGE = "expected explain REQUEST_ID, or status"

flags.DEFINE_string("conductor", None, "host:port of the Conductor.", required=True)


def main(argv: Sequence[str]) -> None:
    stub = Stub(flags.FLAGS.conductor, CONDUCTOR, timeout_seconds=5.0)
    try:
        match list(argv[1:]):
            case ["explain", request_id]:
                print(table(stub.explain(ExplainRequest(request_id))))
            case ["status"]:
                print(_status(stub))
            case _:
                raise UsageError(f"{' '.join(argv[1:]) or 'no command'}: {USAGE}")
    except StoreError as error:
        raise UsageError(str(error)) from None
    finally:
        stub.close()


def _status(stub: Stub) -> str:
    cluster, status = stub.cluster(Empty()), stub.status(Empty())
    lines = ["ready" if cluster.ready else "not ready"]
    for info, load in zip(cluster.instances, cluster.loads, strict=True):
        lines.append(
            f"{info.instance.name:<20} {info.role:<8} {info.model:<24} {info.instance.address:<22} "
            f"{load.used_slots} of {info.num_slots} slots, {len(load.request_ids)} requests, "
            f"{load.queued_tokens} tokens queued"
        )
    figures = {**status.books, **cluster.metrics}
    return "\n".join([*lines, *(f"{name:<36} {value:g}" for name, value in figures.items())])


if __name__ == "__main__":
    run_main(main, num_arguments=2)

"""Looks at a KVCache store, and changes it.

python -m launch.kvstore_ctl --directory=127.0.0.1:9000                            # nodes, tiers, hit rates
python -m launch.kvstore_ctl --directory=127.0.0.1:9000 --action=keys --node=store-0
python -m launch.kvstore_ctl --directory=127.0.0.1:9000 --action=drain --node=store-0
python -m launch.kvstore_ctl --directory=127.0.0.1:9000 --action=repair --replicas=2
python -m launch.kvstore_ctl --directory=127.0.0.1:9000 --action=drop_namespace --namespace=NAME
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from absl import flags
from tqdm import tqdm

from kvstore import Client, MoveReport
from kvstore.errors import StoreError
from kvstore.messages import NODE, NodeInfo
from kvstore.rpc import Empty, Stub
from kvstore.transfer import TransferEngine
from launch.flags import define
from launch.process import EXIT_FAILED, UsageError, run_main

_SYNC_SECONDS = 10.0
define("host", "directory")
ACTION = flags.DEFINE_enum(
    "action",
    "nodes",
    ["nodes", "keys", "drain", "undrain", "repair", "drop_namespace"],
    "nodes: a line for each; keys: each with its replicas and their tiers; drain: --node takes nothing new and "
    "its objects get other homes; undrain: it takes new ones again; repair: at least --replicas of everything; "
    "drop_namespace: remove all of --namespace.",
)
NODE_NAME = flags.DEFINE_string("node", "", "Name of a store node.")
REPLICAS = flags.DEFINE_integer("replicas", 2, "How many replicas `repair` sees to.", 1)
NAMESPACE = flags.DEFINE_string("namespace", "", "What `drop_namespace` removes.")
FLAGS = flags.FLAGS


def main(_: Sequence[str]) -> int:
    if ACTION.value in ("drain", "undrain") and not NODE_NAME.value:
        raise UsageError(f"--action={ACTION.value}: say which --node")
    if ACTION.value == "drop_namespace" and not NAMESPACE.value:
        raise UsageError("--action=drop_namespace: say which --namespace")
    try:
        with ExitStack() as stack:
            return _act(_client(stack))
    except (StoreError, OSError) as error:
        print(f"python -m launch.kvstore_ctl: {error}", file=sys.stderr)
        return EXIT_FAILED


def _client(stack: ExitStack) -> Client:
    engine = TransferEngine(host_id="kvstore_ctl", host=FLAGS.host)
    stack.callback(engine.close)
    client = Client(FLAGS.directory, engine=engine)
    stack.callback(client.close)
    if not client.replica.wait_in_sync(_SYNC_SECONDS):
        raise OSError(f"no directory answers at {FLAGS.directory}")
    return client


def _act(client: Client) -> int:
    action, node = ACTION.value, NODE_NAME.value
    if action == "nodes":
        _print_table([_node_row(client, info) for info in _nodes(client)])
    elif action == "keys":
        _print_table([row for info in _nodes(client) for row in _key_rows(client, info)])
    elif action == "undrain":
        client.replicas.undrain(node)
    elif action == "drop_namespace":
        print(f"{client.drop_namespace(NAMESPACE.value)} objects of {NAMESPACE.value} removed")
    else:
        with _progress() as progress:
            report = (
                client.replicas.drain(node, progress.update)
                if action == "drain"
                else client.replicas.repair(REPLICAS.value, progress.update)
            )
        return _say(report)
    return 0


def _nodes(client: Client) -> list[NodeInfo]:
    infos = [info for info in client.replica.nodes() if NODE_NAME.value in ("", info.name)]
    return sorted(infos, key=lambda info: info.name)


def _node_row(client: Client, info: NodeInfo) -> dict[str, object]:
    row: dict[str, object] = {"node": info.name, "host": info.host_id, "address": info.address}
    stub = Stub(info.address, NODE)
    try:
        reply = stub.stats(Empty())
    except StoreError as error:
        return {**row, "state": f"silent: {error}"}
    finally:
        stub.close()
    stats = reply.stats
    asked = stats["hit"] + stats["missed"]
    held = sum(reply.namespaces.values())
    return {
        **row,
        "state": "draining" if stats["is_draining"] else "serving",
        "objects": held,
        "dram": f"{stats['committed']}/{stats['slots']}",
        "ssd": f"{stats['ssd_held']}/{stats['ssd_slots']}" if "ssd_slots" in stats else "-",
        "hits": f"{stats['hit'] / asked:.1%}" if asked else "-",
        "from_ssd": f"{stats.get('ssd_read', 0) / asked:.1%}" if asked else "-",
        "evicted": stats["evicted"],
        "damaged": stats["corrupt"] + stats.get("ssd_damaged", 0),
        "namespaces": ",".join(f"{name or '(none)'}={num}" for name, num in sorted(reply.namespaces.items())),
    }


def _key_rows(client: Client, info: NodeInfo) -> Iterator[dict[str, object]]:
    """The keys of a node whose first holder it is, or that was asked for: each is shown once."""
    keys = sorted(client.replica.keys(info.name))
    for key, tiers in zip(keys, client.replica.replicas(keys), strict=True):
        if NODE_NAME.value or min(tiers, default="") == info.name:
            where = " ".join(f"{name}:{tier}" for name, tier in sorted(tiers.items()))
            yield {"key": key.hex(), "replicas": len(tiers), "where": where}


def _print_table(rows: list[dict[str, object]]) -> None:
    titles = list(dict.fromkeys(title for row in rows for title in row))
    lines = [titles, *([str(row.get(title, "")) for title in titles] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@contextmanager
def _progress() -> Iterator[tqdm]:
    with tqdm(unit=" objects", file=sys.stderr, disable=None) as bar:
        yield bar


def _say(report: MoveReport) -> int:
    print(f"{report.num_done} of {report.num_keys} objects that were short of replicas have them now")
    for reason, count in report.failures.items():
        print(f"{count} not: {reason}")
    return EXIT_FAILED if report.failures else 0


if __name__ == "__main__":
    run_main(main)

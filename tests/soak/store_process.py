"""A part of the store in a process that tests kill: `python store_process.py node|directory|writer …`.

What is stored under a key follows from the key, so that every reader can judge every byte.
"""

from __future__ import annotations

import random
import sys

from kvstore import Client, Directory, Node, NodeConfig
from kvstore.rpc import Server
from kvstore.transfer import TransferEngine

NBYTES, PART = 40_000, 10_000
NUM_SLOTS = 24
LEASE_SECONDS = 0.5


def content(key: bytes) -> bytes:
    """The one value of a key."""
    return random.Random(key).randbytes(NBYTES)


def node(directory: str, port: str, ssd_path: str) -> None:
    engine = TransferEngine(host_id="killed")
    config = NodeConfig(
        "killed", "killed", NUM_SLOTS * 40_064, NBYTES, LEASE_SECONDS, ssd_path=ssd_path, ssd_nbytes=3_000_000
    )
    store = Node(config, engine)
    server = Server(store.handlers(), port=int(port))
    store.join(directory, server.address)
    print(server.port, flush=True)
    sys.stdin.read()


def directory(port: str) -> None:
    own = Directory(node_timeout_seconds=3.0)
    server = Server(own.handlers(), port=int(port), max_workers=own.max_workers)
    print(server.port, flush=True)
    sys.stdin.read()


def writer(directory: str, seed: str) -> None:
    """Puts for ever, and says which keys before it does."""
    client = Client(directory, engine=TransferEngine(host_id="writer"))
    client.replica.wait_in_sync(30)
    rng = random.Random(int(seed))
    while True:
        keys = [rng.randbytes(16) for _ in range(4)]
        print(b"".join(keys).hex(), flush=True)
        client.put(keys, [content(key) for key in keys], PART)


if __name__ == "__main__":
    {"node": node, "directory": directory, "writer": writer}[sys.argv[1]](*sys.argv[2:])

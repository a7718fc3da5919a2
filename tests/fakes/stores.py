"""A small cluster in one process: directory, nodes, clients, real gRPC, the real transfer engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore import Client, Directory, Node, NodeConfig
from kvstore.rpc import Server
from kvstore.transfer import Faults, TransferEngine

DEADLINE_SECONDS = 20.0


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; fail when it does not in time."""
    tick, end = threading.Event(), time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, "did not become true in time"
        tick.wait(0.005)


@dataclass
class StoreNode:
    """A node with its engine and its server."""

    node: Node
    engine: TransferEngine
    server: Server

    def close(self) -> None:
        self.node.close()
        self.server.close()
        self.engine.close()


class Cluster:
    """Everything is closed at the end, after the books of every node were checked."""

    def __init__(self) -> None:
        self._clients: list[Client] = []
        self._engines: list[TransferEngine] = []
        self._nodes: list[StoreNode] = []
        self.directory = Directory(node_timeout_seconds=3.0)
        self._serve_directory(0)

    def _serve_directory(self, port: int) -> None:
        self.directory_server = Server(
            self.directory.handlers(), port=port, max_workers=self.directory.max_workers
        )
        self.address = self.directory_server.address

    def stop_directory(self) -> None:
        self.directory.close()
        self.directory_server.close()

    def restart_directory(self) -> None:
        """Another directory on the same address, which knows nothing."""
        self.stop_directory()
        self.directory = Directory(node_timeout_seconds=3.0)
        self._serve_directory(self.directory_server.port)

    def engine(self, host_id: str = "host-client", faults: Faults | None = None) -> TransferEngine:
        self._engines.append(TransferEngine(host_id=host_id, faults=faults))
        return self._engines[-1]

    def node(
        self,
        name: str,
        *,
        host_id: str | None = None,
        num_slots: int = 8,
        slot_nbytes: int = 1024,
        lease_seconds: float = 10.0,
        port: int = 0,
        ssd: Path | None = None,
        ssd_nbytes: int = 1_000_000,
    ) -> StoreNode:
        """A node that has joined; each on a host of its own unless told otherwise; `ssd`: its folder."""
        host = host_id or f"host-{name}"
        engine = TransferEngine(host_id=host)
        tier = {} if ssd is None else {"ssd_path": str(ssd), "ssd_nbytes": ssd_nbytes}
        config = NodeConfig(name, host, num_slots * slot_nbytes, slot_nbytes, lease_seconds, **tier)
        node = Node(config, engine)
        store = StoreNode(node, engine, Server(node.handlers(), port=port))
        node.join(self.address, store.server.address)
        self._nodes.append(store)
        assert node.flush(DEADLINE_SECONDS)
        return store

    def client(
        self,
        home: StoreNode | None = None,
        *,
        host_id: str = "host-client",
        faults: Faults | None = None,
        timeout_seconds: float = DEADLINE_SECONDS,
    ) -> Client:
        """A client in sync with the directory."""
        engine = home.engine if home else self.engine(host_id, faults)
        client = Client(
            self.address, engine=engine, home=home.node if home else None, timeout_seconds=timeout_seconds
        )
        self._clients.append(client)
        assert client.replica.wait_in_sync(DEADLINE_SECONDS)
        return client

    def stop(self, store: StoreNode) -> None:
        """Close one node now, after its books were checked."""
        self._nodes.remove(store)
        store.node.validate()
        store.close()

    def forget(self, client: Client) -> None:
        """Close one client now."""
        self._clients.remove(client)
        client.close()

    def settle(self) -> None:
        """Wait until the directory and every client have heard of everything that nodes have done so far."""
        for store in self._nodes:
            assert store.node.flush(DEADLINE_SECONDS)
        sequence = self.directory._state.log.sequence
        for client in self._clients:
            wait_until(lambda state=client.replica._state: state.position.sequence >= sequence)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for store in self._nodes:
            store.node.validate()
            store.close()
        for engine in self._engines:
            engine.close()
        self.stop_directory()

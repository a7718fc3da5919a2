"""One engine role in a process: transfer engine, home node, store client, service, gRPC server, membership.

`start_prefill` and `start_decode` are what launchers and tests call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from kvstore import Client, Node, NodeConfig
from kvstore.rpc import Server, Service
from kvstore.transfer import SharedBuffer, Topology, TransferEngine, Upstream
from mooncake_jax.decode.answers import AnswerSaver
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.decode.service import DecodeService
from mooncake_jax.decode.staging import Staging
from mooncake_jax.decode.worker import DecodeWorker
from mooncake_jax.engine.contract import DecodeEngine, PrefillEngine
from mooncake_jax.membership import Membership
from mooncake_jax.messages import DECODE, PREFILL, InstanceInfo, Role
from mooncake_jax.prefill.config import PrefillConfig
from mooncake_jax.prefill.fetch_times import FetchTimes
from mooncake_jax.prefill.job import KVPaths
from mooncake_jax.prefill.service import PrefillService
from mooncake_jax.prefill.worker import PrefillWorker
from mooncake_jax.request import Instance

_SPARE_RPC_THREADS = 32  # for unary calls and store traffic, beside one per open stream


@dataclass(frozen=True)
class InstanceConfig:
    """What prefill and decode instances have in common.

    `name` also names the home node: unique in the cluster.
    """

    name: str
    model: str
    directory_address: str
    conductor_addresses: tuple[str, ...]  # of all Conductors: each places requests here, and hears of all
    host_id: str  # equal ones share memory; different ones talk TCP
    host: str = "127.0.0.1"
    port: int = 0
    dram_nbytes: int = 256 << 20  # the home node's
    ssd_path: str = ""  # folder of the home node's SSD tier, if it has one
    ssd_nbytes: int = 0
    heartbeat_seconds: float = 1.0
    ready_seconds: float = 1800.0  # the most that warm-up may take
    transfer_timeout_seconds: float = 10.0
    rate_limit_nbytes_per_second: float | None = None
    rails: tuple[str, ...] = ()  # addresses of NICs to exchange KV on, instead of `host`
    topology: Topology | None = None  # which of them are near which memory
    num_nodes: int = 1  # that compute together (CPP); each as fast as the Conductor's cost model says
    upstream: Upstream | None = None  # RDMA devices to exchange KV by


class _Ports(NamedTuple):
    """What both roles are built from."""

    config: InstanceConfig
    transfer: TransferEngine
    home: Node
    client: Client


class _Parts(NamedTuple):
    """What a role adds."""

    role: Role
    table: Service
    service: PrefillService | DecodeService
    wait_ready: Callable[[float], None]
    max_streams: int


class EngineInstance:
    """A running instance. Close it in the end: until then it serves."""

    def __init__(
        self,
        config: InstanceConfig,
        engine: PrefillEngine | DecodeEngine,
        role: Callable[[_Ports, ExitStack], _Parts],
    ):
        """Use `start_prefill` or `start_decode`."""
        with ExitStack() as stack:
            self.transfer = TransferEngine(
                host_id=config.host_id,
                host=config.host,
                rate_limit_nbytes_per_second=config.rate_limit_nbytes_per_second,
                timeout_seconds=config.transfer_timeout_seconds,
                rails=config.rails,
                topology=config.topology,
                upstream=config.upstream,
            )
            stack.callback(self.transfer.close)
            node_config = NodeConfig(
                config.name,
                config.host_id,
                config.dram_nbytes,
                engine.format.nbytes,
                ssd_path=config.ssd_path,
                ssd_nbytes=config.ssd_nbytes,
                namespace=engine.fingerprint.hex(),
            )
            self.home = Node(node_config, self.transfer)
            stack.callback(self.home.close)
            self.client = Client(config.directory_address, engine=self.transfer, home=self.home)
            stack.callback(self.client.close)
            parts = role(_Ports(config, self.transfer, self.home, self.client), stack)
            self.service = parts.service
            server = Server(
                [(parts.table, parts.service), *self.home.handlers()],
                host=config.host,
                port=config.port,
                max_workers=parts.max_streams + _SPARE_RPC_THREADS,
            )
            stack.callback(server.close)
            self.home.join(config.directory_address, server.address)
            parts.wait_ready(config.ready_seconds)
            self.info = InstanceInfo(
                instance=Instance(config.name, server.address, self.transfer.peer.epoch),
                role=parts.role,
                model=config.model,
                fingerprint=engine.fingerprint,
                format=engine.format,
                max_tokens=engine.max_tokens,
                home_node=self.home.name,
                host_id=config.host_id,
                num_slots=engine.num_slots,
                kv_capacity_tokens=engine.num_slots * engine.max_tokens,
                num_nodes=config.num_nodes,
            )
            for address in config.conductor_addresses:
                membership = Membership(
                    address, self.info, parts.service.beats(), interval_seconds=config.heartbeat_seconds
                )
                stack.callback(membership.close)
            self._stack = stack.pop_all()

    @property
    def address(self) -> str:
        """gRPC host:port."""
        return self.info.instance.address

    def close(self) -> None:
        """Leaves the cluster, ends what runs, and joins every thread. May be called again."""
        self._stack.close()


def start_prefill(config: InstanceConfig, engine: PrefillEngine, role: PrefillConfig) -> EngineInstance:
    """Returns when the engine is warm and the instance serves; it registers at the Conductor in the
    background.

    `engine` is called from one thread of the instance only. Raises UnavailableError when the engine does not
    get ready, OSError when the address or the memory cannot be had.
    """

    def parts(ports: _Ports, stack: ExitStack) -> _Parts:
        if (slots := ports.home.slots) is not None:
            engine.attach(slots)
        worker = PrefillWorker(engine, role)
        stack.callback(worker.close)
        paths = KVPaths(engine.format, ports.home, ports.client, ports.transfer, FetchTimes())
        service = PrefillService(config.name, ports.transfer.peer.epoch, engine, worker, paths)
        return _Parts("prefill", PREFILL, service, worker.wait_ready, role.max_queue)

    return EngineInstance(config, engine, parts)


def start_decode(config: InstanceConfig, engine: DecodeEngine, role: DecodeConfig) -> EngineInstance:
    """As `start_prefill`."""

    def parts(ports: _Ports, stack: ExitStack) -> _Parts:
        name, epoch = config.name, ports.transfer.peer.epoch
        memory = SharedBuffer(f"{name}-staging", role.staging_nbytes)
        stack.callback(memory.close)
        segment = ports.transfer.register_local_memory(
            memory.array, name=f"staging/{name}/{epoch:x}", shm_path=memory.path
        )
        staging = Staging(name, epoch, engine.format, memory.array, segment, role)
        saver = AnswerSaver(ports.home, engine.format, role.max_saving_blocks)
        stack.callback(saver.close)
        worker = DecodeWorker(engine, saver)
        stack.callback(worker.close)
        service = DecodeService(
            name, epoch, engine, worker, staging, saver, home=ports.home, transfer=ports.transfer, config=role
        )
        return _Parts("decode", DECODE, service, worker.wait_ready, engine.num_slots + role.max_waiting)

    return EngineInstance(config, engine, parts)

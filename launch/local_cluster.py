"""A cluster of processes on this machine: `with Cluster(ClusterConfig(...)) as cluster`."""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from kvstore.rpc import Empty, Stub
from launch.model_source import served_name
from launch.supervisor import Command, Supervisor, SupervisorError
from mooncake_jax.messages import CONDUCTOR

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ClusterConfig:
    """Sizes are per process. With `host_ids` of their own, prefill instances exchange KV over TCP."""

    model: str
    run_dir: Path
    dtype: str = "bfloat16"
    served_model: str = ""
    num_prefill: int = 2
    num_decode: int = 1
    num_stores: int = 1
    prefill_host_ids: tuple[str, ...] = ("host-0", "host-1")  # taken in turn
    decode_host_ids: tuple[str, ...] = ("host-0",)
    host: str = "127.0.0.1"
    port: int = 0  # of the frontend; another one if it is taken
    max_tokens: int = 0
    prefill_slots: int = 2
    decode_slots: int = 8
    dram_nbytes: int = 512 << 20
    staging_nbytes: int = 512 << 20
    ssd_path: str = ""  # folder in which every store node has one of its own, by its name; no SSD if empty
    ssd_nbytes: int = 0  # of each
    compile_cache: str = ""
    pin: bool = False
    engine_flags: tuple[str, ...] = ()  # more flags of every prefill and decode instance
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    conductor_flags: tuple[str, ...] = ()
    num_more_conductors: int = 0  # which instances beat to as well, from `Cluster.start_conductor` on
    ready_seconds: float = 900.0

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if bool(self.ssd_path) != bool(self.ssd_nbytes):
            raise ValueError(f"give both or none: {self.ssd_path=}, {self.ssd_nbytes=}")
        if not self.prefill_host_ids or not self.decode_host_ids:
            raise ValueError("prefill_host_ids and decode_host_ids need at least one entry each")

    @property
    def model_name(self) -> str:
        """What requests ask for."""
        return self.served_model or served_name(self.model)


class Cluster:
    """Running processes, from the constructor, which returns when requests can be served, to `close`."""

    def __init__(
        self, config: ClusterConfig, progress: Callable[[str, str], None] = lambda name, address: None
    ):
        """`progress(name, address)` as each role gets ready. Raises SupervisorError; nothing is left then."""
        self.config = config
        self.instances: dict[str, str] = {}  # addresses by name
        self._more_ports = _unused_ports(config.num_more_conductors)
        self.supervisor = Supervisor(config.run_dir)
        try:
            self._start(progress)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Of the OpenAI API, without the `/v1`."""
        return f"http://{self.instances['frontend']}"

    def close(self) -> None:
        self.supervisor.close()

    def wait_ready(self, timeout_seconds: float) -> None:
        """Until the frontend says so. Raises SupervisorError when that takes too long."""
        deadline = time.monotonic() + timeout_seconds
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise SupervisorError(f"{self.url}/ready: not within {timeout_seconds:g} s")
            time.sleep(0.05)

    def start_conductor(self, *conductor_flags: str) -> str:
        """One of `num_more_conductors`, with these flags; returns its address once every instance has registered.

        Raises SupervisorError when it does not start, ValueError when all have been started.
        """
        if not self._more_ports:
            raise ValueError(f"all {self.config.num_more_conductors} further Conductors have been started")
        port = self._more_ports.pop()
        name = f"conductor-{port}"
        command = _conductor(name, self.instances["directory"], (*conductor_flags, f"--port={port}"))
        address = self._run([command], lambda name, address: None)[name]
        num_engines = self.config.num_prefill + self.config.num_decode
        deadline = time.monotonic() + self.config.ready_seconds
        with closing(Stub(address, CONDUCTOR, timeout_seconds=5.0)) as stub:
            while len(stub.cluster(Empty()).instances) < num_engines:
                if time.monotonic() > deadline:
                    raise SupervisorError(f"{name}: not all of {num_engines} instances have registered")
                time.sleep(0.05)
        return address

    def _start(self, progress: Callable[[str, str], None]) -> None:
        directory = self._run([_directory()], progress)["directory"]
        command = _conductor("conductor", directory, self.config.conductor_flags)
        conductor = self._run([command], progress)["conductor"]
        conductors = [conductor, *(f"{LOOPBACK}:{port}" for port in self._more_ports)]
        engines = _engines(self.config, directory, conductors)
        first = [engines["prefill-0"], engines["decode-0"]]  # they compile; the others find it in the cache
        others = [command for command in engines.values() if command not in first]
        stores = _stores(self.config, directory)
        frontend = _frontend(self.config, conductor, _free_port(self.config.host, self.config.port))
        self._run([frontend, *stores, *first], progress)
        self._run(others, progress)
        self.wait_ready(self.config.ready_seconds)

    def _run(self, commands: list[Command], progress: Callable[[str, str], None]) -> dict[str, str]:
        for command in commands:
            self.supervisor.start(command)
        names = [command.name for command in commands]
        found = self.supervisor.wait_ready(names, self.config.ready_seconds, progress)
        self.instances |= found
        return found

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False


def _directory() -> Command:
    return Command("directory", ("-m", "launch.directory"), keeps_port=True)


def _conductor(name: str, directory: str, conductor_flags: tuple[str, ...]) -> Command:
    argv = ("-m", "launch.conductor", f"--directory={directory}", *conductor_flags)
    return Command(name, argv, keeps_port=True)


def _frontend(config: ClusterConfig, conductor: str, port: int) -> Command:
    argv = (
        "-m",
        "launch.frontend",
        f"--model={config.model}",
        f"--served_model={config.model_name}",
        f"--conductor={conductor}",
        f"--host={config.host}",
        f"--port={port}",
    )
    return Command("frontend", argv, keeps_port=True)


def _stores(config: ClusterConfig, directory: str) -> list[Command]:
    return [
        Command(
            f"store-{i}",
            (
                "-m",
                "launch.kvstore",
                f"--name=store-{i}",
                f"--directory={directory}",
                f"--host_id={config.decode_host_ids[0]}",
                f"--model={config.model}",
                f"--dtype={config.dtype}",
                f"--dram_bytes={config.dram_nbytes}",
                *_ssd(config, f"store-{i}"),
            ),
        )
        for i in range(config.num_stores)
    ]


def _ssd(config: ClusterConfig, name: str) -> list[str]:
    """Flags of the SSD tier of one process, whose folder is found again when it is restarted."""
    if not config.ssd_path:
        return []
    return [f"--ssd_path={Path(config.ssd_path) / name}", f"--ssd_nbytes={config.ssd_nbytes}"]


def _engines(config: ClusterConfig, directory: str, conductors: list[str]) -> dict[str, Command]:
    """Prefill and decode instances by name."""
    roles = [("prefill", i, config.prefill_host_ids) for i in range(config.num_prefill)]
    roles += [("decode", i, config.decode_host_ids) for i in range(config.num_decode)]
    cores = core_sets(sorted(os.sched_getaffinity(0)), len(roles)) if config.pin else [[]] * len(roles)
    commands = {}
    for (role, i, host_ids), own_cores in zip(roles, cores, strict=True):
        name = f"{role}-{i}"
        argv = [
            "-m",
            f"launch.{role}",
            f"--name={name}",
            f"--model={config.model}",
            f"--dtype={config.dtype}",
            f"--directory={directory}",
            f"--conductor={','.join(conductors)}",
            f"--host_id={host_ids[i % len(host_ids)]}",
            f"--max_tokens={config.max_tokens}",
            f"--dram_bytes={config.dram_nbytes}",
            f"--compile_cache={config.compile_cache}",
            f"--cores={','.join(map(str, own_cores))}",
            *_ssd(config, name),
            *config.engine_flags,
        ]
        if role == "prefill":
            argv += [f"--slots={config.prefill_slots}", *config.prefill_flags]
        else:
            argv += [f"--slots={config.decode_slots}", f"--staging_bytes={config.staging_nbytes}"]
            argv += config.decode_flags
        commands[name] = Command(name, tuple(argv))
    return commands


def core_sets(cores: list[int], num_roles: int) -> list[list[int]]:
    """A share of `cores` for each role; they take turns where there are not enough."""
    if len(cores) < num_roles:
        return [[cores[i % len(cores)]] for i in range(num_roles)]
    return [cores[i::num_roles] for i in range(num_roles)]


def _unused_ports(num: int) -> list[int]:
    """Ports of loopback, all different, that nobody has now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]


def _free_port(host: str, wanted: int) -> int:
    """`wanted`, or 0 (any) when somebody has it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError:
            return 0
    return wanted

"""Flags that several launchers share, each defined once; a launcher asks for those it needs by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.process import UsageError, set_cores

if TYPE_CHECKING:
    from kvstore.transfer import Topology, Upstream

MODEL_HELP = "Checkpoint folder of ours, Hugging Face folder, GGUF file, or preset:tiny for random weights."
_SHARED: dict[str, Callable[[], Any]] = {
    "name": lambda: flags.DEFINE_string("name", None, "Unique name in the cluster.", required=True),
    "host": lambda: flags.DEFINE_string("host", "127.0.0.1", "Address to bind; there is no access control."),
    "port": lambda: flags.DEFINE_integer("port", 0, "Port to bind; 0: a free one.", 0, 65535),
    "host_id": lambda: flags.DEFINE_string(
        "host_id", "localhost", "Processes with equal ids share memory; others exchange KV over TCP."
    ),
    "rails": lambda: flags.DEFINE_list(
        "rails",
        [],
        "Addresses of this host's NICs to exchange KV on, such as 10.0.0.1,fd00::1; auto: one of every NIC that has "
        "one. Empty: --host alone.",
    ),
    "topology": lambda: flags.DEFINE_string(
        "topology",
        "",
        'Which NICs are near which memory, for the choice of a rail: JSON {"cpu:0": [[preferred], [secondary]]}, a '
        "file of it, or empty to ask the kernel. python -m launch.topology prints it.",
    ),
    "rdma": lambda: flags.DEFINE_list(
        "rdma",
        [],
        "RDMA devices to exchange KV by, such as mlx5_0,mlx5_1, through the upstream engine (docs/transfer.md), with "
        "peers that have some. Empty: TCP and shared memory alone.",
    ),
    "rdma_multi_nic": lambda: flags.DEFINE_bool(
        "rdma_multi_nic", False, "One upstream engine for all of --rdma, which chooses the NIC itself."
    ),
    "rdma_protocol": lambda: flags.DEFINE_enum(
        "rdma_protocol",
        "rdma",
        ["rdma", "tcp"],
        "tcp: what the upstream engine does without RDMA, to try it.",
    ),
    "directory": lambda: flags.DEFINE_string("directory", None, "host:port of the directory.", required=True),
    "conductor": lambda: flags.DEFINE_string("conductor", None, "host:port of the Conductor.", required=True),
    "conductors": lambda: flags.DEFINE_list(
        "conductor", None, "host:port of the Conductor, or of each of several.", required=True
    ),
    "model": lambda: flags.DEFINE_string("model", None, MODEL_HELP, required=True),
    "dtype": lambda: flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and KV."),
    "max_tokens": lambda: flags.DEFINE_integer(
        "max_tokens", 0, "Longest prompt + answer, in tokens; 0: as long as the model allows.", 0
    ),
    "dram_bytes": lambda: flags.DEFINE_integer(
        "dram_bytes", 512 << 20, "DRAM for KV blocks of the store node, in bytes.", 1
    ),
    "ssd_path": lambda: flags.DEFINE_string(
        "ssd_path", "", "Folder of its own for the store node's SSD tier; no such tier if empty."
    ),
    "ssd_nbytes": lambda: flags.DEFINE_integer(
        "ssd_nbytes", 0, "The most that --ssd_path may take on disk, in bytes.", 0
    ),
    "cores": lambda: flags.DEFINE_list("cores", [], "CPU cores to run on, such as 0,1; all if empty."),
    "engine": lambda: flags.DEFINE_enum(
        "engine",
        "jax",
        ["jax", "emulated"],
        "emulated: computes nothing, takes the time that --cost_model says; bytes and requests are real.",
    ),
    "cost_model": lambda: flags.DEFINE_string(
        "cost_model", "a800_llama3_70b", "emulated: cost model, by name or as a file of launch.profile."
    ),
    "time_scale": lambda: flags.DEFINE_float(
        "time_scale", 1.0, "emulated: real seconds that a modelled second takes.", 1e-6
    ),
    "block_tokens": lambda: flags.DEFINE_integer(
        "block_tokens", 0, "emulated: tokens of a KV block; 0: as --model has them.", 0
    ),
    "compile_cache": lambda: flags.DEFINE_string(
        "compile_cache", "", "Folder to keep compiled programs in, shared by processes; none if empty."
    ),
}
flags.disclaim_key_flags()  # they are the launchers', so that their --help shows them


def define(*names: str) -> None:
    """Define these shared flags for the calling launcher."""
    for name in names:
        _SHARED[name]()


TRANSFER_FLAGS = ("rails", "topology", "rdma", "rdma_multi_nic", "rdma_protocol")


def transfer_rails() -> dict[str, Any]:
    """Arguments of a transfer engine from `TRANSFER_FLAGS` and --host. Raises UsageError."""
    from kvstore.transfer.sysfs import nic_addresses

    rails: list[str] = flags.FLAGS.rails
    topology = read_topology(flags.FLAGS.topology)
    if rails == ["auto"]:
        rails = nic_addresses(topology.devices)
        if not rails:
            raise UsageError(f"--rails=auto: no NIC of {topology.devices} has an address: name them")
    upstream = _upstream(flags.FLAGS.rdma)
    has_choice = len(rails) > 1 or len(flags.FLAGS.rdma) > 1
    return {"rails": tuple(rails), "topology": topology if has_choice else None, "upstream": upstream}


def _upstream(devices: list[str]) -> Upstream | None:
    if not devices:
        return None
    from kvstore.transfer import Upstream

    if len(set(devices)) < len(devices):
        raise UsageError(f"--rdma={','.join(devices)} names a device twice")
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise UsageError(
            f"--rdma: the upstream engine cannot be loaded: pip install 'mooncake-jax[rdma]' ({error})"
        ) from None
    values = flags.FLAGS
    return Upstream(tuple(devices), values.host, values.rdma_protocol, values.rdma_multi_nic)


def read_topology(text: str) -> Topology:
    """What --topology says. Raises UsageError."""
    from kvstore.transfer.sysfs import discover
    from kvstore.transfer.topology import Topology

    try:
        if not text:
            return discover()
        return Topology.parse(text if text.lstrip().startswith("{") else Path(text).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--topology={text}: {error}") from error


def pin_to_cores() -> None:
    """Do what --cores says. Raises UsageError."""
    try:
        set_cores([int(core) for core in flags.FLAGS.cores])
    except ValueError:
        raise UsageError(f"--cores={','.join(flags.FLAGS.cores)}: expected numbers, such as 0,1") from None


def keep_compiled_programs(folder: str) -> None:
    """Do what --compile_cache=`folder` says, before anything is compiled."""
    if not folder:
        return
    from mooncake_jax.engine.compiles import use_persistent_cache

    use_persistent_cache(str(Path(folder).absolute()))

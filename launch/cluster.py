"""A whole cluster on this machine: every role its own process, watched over and restarted.

    python -m launch.cluster --model=preset:tiny --dtype=float32 --port=8000

Then, from another terminal:

    curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "tiny", "prompt": "The capital of France is", "max_tokens": 8}'

Ctrl-C ends all of it. Logs are in --run_dir. A cluster of nodes that nobody has, at real prompt lengths:

    python -m launch.cluster --model=preset:tiny --engine=emulated --cost_model=a800_llama3_70b --time_scale=0.1 \\
        --block_tokens=512 --max_tokens=140000 --prefill=8 --decode=8
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from launch.flags import MODEL_HELP, define
from launch.huge_pages import use_huge_pages
from launch.local_cluster import Cluster, ClusterConfig
from launch.model_cache import FetchError, cache_directory, smollm2_checkpoint
from launch.process import UsageError, run_main, stoppable, wait_for_signal
from launch.supervisor import END_SECONDS, SupervisorError
from models.checkpoint import CheckpointError
from mooncake_jax.conductor.policy import POLICIES

SMOLLM2 = "smollm2-135m-instruct"
EMULATION_FLAGS = ("engine", "cost_model", "time_scale", "block_tokens")


def default_compile_cache() -> str:
    """Compiled programs, kept for the next start."""
    return str(cache_directory() / "compiled")


def conductor_flags(values: flags.FlagValues) -> tuple[str, ...]:
    """Of the Conductor: emulated engines take the times of a model that it forecasts with."""
    if values.engine != "emulated":
        return (f"--policy={values.policy}",)
    return (
        f"--policy={values.policy}",
        f"--cost_model={values.cost_model}",
        f"--time_scale={values.time_scale}",
    )


def show_progress(name: str, address: str) -> None:
    print(f"  {name:<12} {address}", flush=True)


def say_what_takes_long(compile_cache: str) -> None:
    """Before a cluster starts."""
    if not any(Path(compile_cache).glob("*")):
        print(
            f"prefill and decode compile their programs: minutes, once; kept in {compile_cache}", flush=True
        )


if __name__ == "__main__":
    use_huge_pages()
    define("dtype", "host", "port", "max_tokens", "dram_bytes", *EMULATION_FLAGS)
    POLICY = flags.DEFINE_enum("policy", "global", sorted(POLICIES), "As --policy of the Conductor.")
    MODEL = flags.DEFINE_string("model", "", f"{MODEL_HELP} If empty, SmolLM2-135M-Instruct, fetched.")
    SERVED_NAME = flags.DEFINE_string("served_model", "", "Name that requests ask for; as --model if empty.")
    PREFILL = flags.DEFINE_integer("prefill", 2, "Prefill instances.", 1)
    DECODE = flags.DEFINE_integer("decode", 1, "Decode instances.", 1)
    STORES = flags.DEFINE_integer("stores", 1, "Stand-alone store nodes.", 0)
    HOST_IDS = flags.DEFINE_list("prefill_host_ids", "host-0,host-1", "Hosts of prefill instances, in turn.")
    DECODE_HOST_IDS = flags.DEFINE_list("decode_host_ids", "host-0", "Hosts of decode instances, in turn.")
    PREFILL_SLOTS = flags.DEFINE_integer("prefill_slots", 2, "Prompts in a prefill instance's cache.", 1)
    DECODE_SLOTS = flags.DEFINE_integer("decode_slots", 8, "Batch size of a decode instance.", 1)
    SSD_PATH = flags.DEFINE_string(
        "ssd_path",
        "",
        "Folder for SSD tiers: every prefill, decode and store process has a folder of its own in it. Empty: no SSD.",
    )
    SSD_NBYTES = flags.DEFINE_integer("ssd_nbytes", 0, "The most that each of them may take, in bytes.", 0)
    PIN = flags.DEFINE_bool("pin", False, "Give each prefill and decode instance CPU cores of its own.")
    RUN_DIR = flags.DEFINE_string("run_dir", "run/cluster", "Folder for logs.")
    COMPILE_CACHE = flags.DEFINE_string(
        "compile_cache", "", "As --compile_cache of prefill; a default if empty."
    )

    def cluster_config() -> ClusterConfig:
        values = flags.FLAGS
        if bool(SSD_PATH.value) != bool(SSD_NBYTES.value):
            raise UsageError("give --ssd_path and --ssd_nbytes both or none")
        return ClusterConfig(
            model=MODEL.value or str(smollm2_checkpoint(values.dtype)),
            run_dir=Path(RUN_DIR.value),
            dtype=values.dtype,
            served_model=SERVED_NAME.value or ("" if MODEL.value else SMOLLM2),
            num_prefill=PREFILL.value,
            num_decode=DECODE.value,
            num_stores=STORES.value,
            prefill_host_ids=tuple(HOST_IDS.value),
            decode_host_ids=tuple(DECODE_HOST_IDS.value),
            host=values.host,
            port=values.port,
            max_tokens=values.max_tokens,
            prefill_slots=PREFILL_SLOTS.value,
            decode_slots=DECODE_SLOTS.value,
            dram_nbytes=values.dram_bytes,
            ssd_path=SSD_PATH.value,
            ssd_nbytes=SSD_NBYTES.value,
            compile_cache=COMPILE_CACHE.value or default_compile_cache(),
            pin=PIN.value,
            engine_flags=tuple(f"--{name}={values[name].value}" for name in EMULATION_FLAGS),
            conductor_flags=conductor_flags(values),
        )

    def serve() -> None:
        config = cluster_config()
        print(f"starting; logs in {config.run_dir}", flush=True)
        if flags.FLAGS.engine == "jax":
            say_what_takes_long(config.compile_cache)
        with Cluster(config, show_progress) as cluster:
            taken = f" (port {config.port} is taken)" if f":{config.port}" not in cluster.url else ""
            print(f"{config.model_name} is served at {cluster.url}/v1{taken}; Ctrl-C ends it", flush=True)
            wait_for_signal()

    def main(_: object) -> None:
        try:
            stoppable(serve, END_SECONDS)
        except (FetchError, CheckpointError, SupervisorError) as error:
            raise UsageError(str(error)) from None

    run_main(main)

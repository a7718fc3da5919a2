"""A real model, served by a cluster of processes on this machine, and checked against one process.

    python -m launch.demo

Fetches SmolLM2-135M-Instruct, starts every role, asks a chat question, three questions about one long
document (the last placed on the other prefill node, which has to fetch the KV over TCP), and a conversation
of two turns; then stops the cluster and scores every answer with the monolithic engine. Writes
demo/summary.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.cluster import SMOLLM2, default_compile_cache, say_what_takes_long, show_progress
from launch.demonstration.check import check
from launch.demonstration.client import Client, DemoError, Exchange
from launch.demonstration.document import QUESTIONS, document
from launch.demonstration.report import Outcome, show, write_summary
from launch.devices import compute_devices
from launch.huge_pages import use_huge_pages
from launch.local_cluster import Cluster, ClusterConfig
from launch.model_cache import FetchError, smollm2_checkpoint
from launch.process import EXIT_FAILED, run_main, stoppable
from launch.supervisor import END_SECONDS, SupervisorError
from models.checkpoint import CheckpointError

DTYPE = "bfloat16"
MAX_TOKENS = 4096
FOLDER = Path("demo")


def ask_all(client: Client) -> list[Exchange]:
    """What the demo asks, in order. Raises DemoError."""
    log, done = document(), []

    def ask(
        id: str, messages: list[dict[str, str]], max_tokens: int, avoid: tuple[str, ...] = ()
    ) -> Exchange:
        exchange = client.chat(id, messages, max_tokens, avoid)
        done.append(exchange)
        show(exchange)
        return exchange

    ask("chat", [_user("What is the capital of France?")], 48)
    first = ask("document-1", [_user(f"{log}\n{QUESTIONS[0]}")], 32)
    ask("document-2", [_user(f"{log}\n{QUESTIONS[1]}")], 32)
    ask("document-3", [_user(f"{log}\n{QUESTIONS[2]}")], 32, avoid=(first.prefill,))
    opening = _user("Write a short story about a lighthouse keeper and a whale.")
    turn = ask("turn-1", [opening], 128)
    told = {"role": "assistant", "content": turn.text}
    ask("turn-2", [opening, told, _user("Give the story a title.")], 32)
    return done


def run() -> bool:
    """The whole demo; whether all answers are those of the monolith."""
    compute_devices()  # the checker's: a conversion would make one only
    model = str(smollm2_checkpoint(DTYPE))
    config = ClusterConfig(
        model=model,
        run_dir=FOLDER / "logs",
        dtype=DTYPE,
        served_model=SMOLLM2,
        port=8000,
        max_tokens=MAX_TOKENS,
        decode_slots=4,
        dram_nbytes=256 << 20,
        staging_nbytes=256 << 20,
        compile_cache=default_compile_cache(),
    )
    print(f"starting the cluster; logs in {config.run_dir}", flush=True)
    say_what_takes_long(config.compile_cache)
    with Cluster(config, show_progress) as cluster:
        client = Client(cluster.url, SMOLLM2)
        exchanges = ask_all(client)
        moved, compiles = client.settled_counters()
    print("the cluster is stopped; checking the answers against one process", flush=True)
    checks = check(exchanges, model, DTYPE, MAX_TOKENS, config.compile_cache)
    outcome = Outcome(exchanges, checks, moved, compiles)
    write_summary(FOLDER / "summary.json", outcome)
    outcome.show()
    return outcome.all_equal


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def main(_: object) -> int:
    equal = [False]

    def serve() -> None:
        equal[0] = run()

    try:
        if stoppable(serve, END_SECONDS):
            print("the demo was stopped; nothing of it runs any more", file=sys.stderr)
    except (FetchError, CheckpointError, SupervisorError, DemoError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
    return 0 if equal[0] else EXIT_FAILED


if __name__ == "__main__":
    use_huge_pages()
    run_main(main)

"""Rows of suite `engine` that go through HTTP: throughput of the served system, and TTFT cold and with its prefix cached.

A cluster of 2 prefill and 1 decode instances on hosts of their own (so that fetching crosses TCP) serves the same model.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np

from launch.benchmarks.options import Options
from launch.benchmarks.peers import VllmPeer
from launch.benchmarks.record import Row, Series, measure
from launch.cluster import default_compile_cache
from launch.local_cluster import Cluster, ClusterConfig

BATCHES = (1, 8, 32)
CONTEXT, NUM_STEPS = 128, 64
LONG_PROMPT = 7900
RNG = np.random.default_rng(21)
SERVE_ROWS = tuple(f"serve_b{batch}" for batch in BATCHES)
TTFT_ROWS = ("ttft_cold", "ttft_cached_local", "ttft_cached_remote_tcp")


def fresh_prompt(num_tokens: int) -> list[int]:
    """Random token ids that no cache has seen."""
    return RNG.integers(1000, 40_000, num_tokens).tolist()


async def _complete(session: aiohttp.ClientSession, url: str, body: dict) -> tuple[float, dict]:
    """Seconds to the first streamed token, and the response's `mooncake` object from the last chunk."""
    start, first, last = time.perf_counter(), 0.0, {}
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            first = first or time.perf_counter() - start
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"{url} failed in the middle: {chunk['error']}")
            last = chunk.get("mooncake") or last
    return first, last


class Served:
    """The cluster under measurement."""

    def __init__(self, cluster: Cluster):
        self._url, self._model = cluster.url, cluster.config.model_name

    def batch_seconds(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Seconds for all prompts, sent at once, to be answered in full."""

        async def run() -> float:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
                start = time.perf_counter()
                await asyncio.gather(
                    *(_complete(session, self._url, self._body(p, max_tokens)) for p in prompts)
                )
                return time.perf_counter() - start

        return asyncio.run(run())

    def ttft(self, prompt: list[int], avoid: Sequence[str] = ()) -> tuple[float, dict]:
        """TTFT in seconds, and where the request ran."""

        async def run() -> tuple[float, dict]:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
                return await _complete(session, self._url, self._body(prompt, 2, list(avoid)))

        return asyncio.run(run())

    def _body(self, prompt: list[int], max_tokens: int, avoid: list[str] | None = None) -> dict:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return body | ({"mooncake_avoid": avoid} if avoid else {})


def served_rows(options: Options, vllm: VllmPeer | None) -> list[Row]:
    """The rows that `options` wants."""
    if not any(map(options.wants, SERVE_ROWS + TTFT_ROWS)):
        return []
    batches = [batch for batch in BATCHES if options.wants(f"serve_b{batch}")]
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as run_dir:
        config = ClusterConfig(
            model=options.model,
            run_dir=Path(run_dir),
            num_stores=0,
            decode_slots=max(batches, default=1),
            decode_host_ids=("host-0",),
            dram_nbytes=1 << 30,
            staging_nbytes=1 << 30,
            compile_cache=default_compile_cache(),
        )
        with Cluster(config) as cluster:
            served = Served(cluster)
            rows = _serve_rows(options, batches, served, vllm)
            if any(map(options.wants, TTFT_ROWS)):
                rows += _ttft_rows(options, served, vllm)
            return rows


def _serve_rows(options: Options, batches: Sequence[int], served: Served, vllm: VllmPeer | None) -> list[Row]:
    rows = []
    for batch in batches:

        def speed(run, batch: int = batch) -> float:
            prompts = [fresh_prompt(CONTEXT) for _ in range(batch)]
            first = run(prompts, 1)
            return batch * NUM_STEPS / (run(prompts, 1 + NUM_STEPS) - first)

        rows.append(
            measure(
                f"serve_b{batch}",
                "tok/s",
                "higher",
                lambda speed=speed: speed(served.batch_seconds),
                (lambda speed=speed: speed(vllm.seconds)) if vllm else None,
                VllmPeer.name,
                rounds=options.rounds,
            )
        )
    return rows


def _ttft_rows(options: Options, served: Served, vllm: VllmPeer | None) -> list[Row]:
    """Each round: a fresh prompt cold, the same again where it ran, and again on the other prefill instance."""
    series = {name: Series(name, "s", "lower") for name in TTFT_ROWS}
    for _ in range(options.rounds):
        prompt = fresh_prompt(LONG_PROMPT)
        cold, where = served.ttft(prompt)
        time.sleep(1.0)  # the KV has been streamed and announced
        local, here = served.ttft(prompt, avoid=[_other(where["prefill"])])
        remote, there = served.ttft(prompt, avoid=[where["prefill"]])
        _check(where, here, there)
        peers = (vllm.seconds([prompt], 1), vllm.seconds([prompt], 1)) if vllm else (None, None)
        series["ttft_cold"].add(cold, peers[0])
        series["ttft_cached_local"].add(local, peers[1])
        series["ttft_cached_remote_tcp"].add(remote, peers[1])
    return [one.row(VllmPeer.name) for one in series.values() if options.wants(one.name)]


def _other(prefill: str) -> str:
    return {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[prefill]


def _check(cold: dict, local: dict, remote: dict) -> None:
    """The rows are what their names say, or the bench is wrong."""
    if cold["cached_tokens"] or local["prefill"] != cold["prefill"] or local["fetched_tokens"]:
        raise RuntimeError(f"not a local hit: cold {cold}, then {local}")
    if remote["prefill"] == cold["prefill"] or remote["fetched_tokens"] < LONG_PROMPT - 64:
        raise RuntimeError(f"not a remote hit: cold {cold}, then {remote}")

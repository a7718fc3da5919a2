"""Suite `engine`: the model step alone (prefill, decode), and TTFT and throughput of the served system through HTTP.

Our model step is timed around the engine contract, host copies of the results inside. vLLM is timed around its
offline `generate`, so it carries its scheduler; its decode figure is (65 tokens - 1 token) of the same prompts.
`decode_b8_mixed` has no peer: eight requests with the settings of `MIXED_SAMPLING` beside the same eight, all greedy.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from launch.benchmarks.options import Options
from launch.benchmarks.peers import LlamaCppPeer, VllmPeer
from launch.benchmarks.record import Row, measure
from launch.benchmarks.served import served_rows
from launch.cluster import default_compile_cache
from launch.devices import compute_devices
from launch.flags import keep_compiled_programs
from launch.model_cache import smollm2_checkpoint
from launch.model_source import load
from models import draw as draws
from mooncake_jax.engine.contract import BatchRows, DecodeEngine, PrefillEngine
from mooncake_jax.engine.draw_rows import fill as fill_row
from mooncake_jax.engine.jax_decode import JaxDecodeEngine
from mooncake_jax.engine.jax_prefill import JaxPrefillEngine
from mooncake_jax.request import Bias, Sampling

PROMPTS = (128, 512, 2048, 8000)
BATCHES = (1, 8, 32)
LONG_CONTEXT_BATCHES = (8, 32)
CONTEXT, LONG_CONTEXT = 128, 2048
NUM_STEPS = 64
MIXED_SAMPLING = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.95, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=1.0, top_k=50, seed=3),
    Sampling(temperature=1.0, min_p=0.05, seed=4),
    Sampling(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5, seed=5),
    Sampling(repetition_penalty=1.1, biases=[Bias(5, 3.0)]),
    Sampling(temperature=1.0, top_p=0.9, num_top=5, seed=6),
)
MIXED_ROW = f"decode_b{len(MIXED_SAMPLING)}_mixed"
TURN_SECONDS = 2.0
RNG = np.random.default_rng(20)


def fresh_prompt(num_tokens: int) -> np.ndarray:
    """Random token ids that no cache has seen, `[T]`."""
    return RNG.integers(1000, 40_000, num_tokens).astype(np.int32)


def prefill_seconds(engine: PrefillEngine, num_tokens: int, num_prefix: int = 0) -> float:
    """Seconds from the first tile to the first sampled token of a prompt, its KV copied out as when serving.

    `num_prefix` tokens (whole blocks) are reused: their KV comes from host memory. The others are computed.
    """
    tokens = fresh_prompt(num_tokens) % engine.vocab_size
    block = np.zeros(engine.format.group_shape, engine.format.item_dtype)
    prefix = [block] * (num_prefix // engine.format.block_tokens)
    load = (lambda group: prefix) if prefix else None
    start = time.perf_counter()
    for first in range(num_prefix, num_tokens, engine.tile_tokens):
        tile = tokens[first : first + engine.tile_tokens]
        last = first + engine.tile_tokens >= num_tokens
        for _ in engine.prefill(0, tile, first, load=load, sample=Sampling() if last else None):
            pass
        load = None
    return time.perf_counter() - start


def fill(engine: DecodeEngine, batch: int, context: int) -> None:
    """Put `context` tokens' worth of random KV into the first `batch` slots, with room for the steps to come."""
    form = engine.format
    shape = (engine.insert_blocks, *form.shape)
    blocks = RNG.integers(0x3C00, 0x3F80, shape).astype(form.item_dtype)  # small positive bfloat16 numbers
    for slot in range(batch):
        for first in range(0, form.num_blocks(context), engine.insert_blocks):
            engine.insert(slot, first, blocks[: form.num_blocks(context) - first])


def decode_seconds(
    engine: DecodeEngine,
    batch: int,
    context: int,
    num_steps: int = NUM_STEPS,
    settings: Sequence[Sampling] = (),
) -> float:
    """Seconds of `num_steps` decode steps of `batch` rows that begin at `context` tokens each.

    `settings`: how the first rows draw; the others are greedy.
    """
    B = engine.num_slots
    draw = draws.blank(B)
    for row, sampling in enumerate(settings):
        fill_row(draw, row, sampling)
        if sampling.looks_back:
            engine.remember(row, fresh_prompt(context).tolist(), [])
    rows = BatchRows(
        active=np.arange(B) < batch,
        tokens=fresh_prompt(B) % engine.vocab_size,
        positions=np.full(B, context, np.int32),
        draw=draw,
    )
    fill(engine, batch, context)
    start = time.perf_counter()
    for _ in range(num_steps):
        tokens, *_ = engine.generate(rows)
        rows = rows._replace(tokens=tokens, positions=rows.positions + 1)
        draw.step[:] += 1
    return time.perf_counter() - start


def vllm_decode_seconds(vllm: VllmPeer, batch: int, context: int) -> float:
    """vLLM's seconds for `NUM_STEPS` steps of `batch` sequences of `context` tokens."""
    prompts = [fresh_prompt(context).tolist() for _ in range(batch)]
    vllm.seconds(prompts, 1)  # what it caches of them is cached in both measured runs
    first = vllm.seconds(prompts, 1)
    return vllm.seconds(prompts, 1 + NUM_STEPS) - first


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    devices = compute_devices()
    keep_compiled_programs(default_compile_cache())
    options = dataclasses.replace(options, model=options.model or str(smollm2_checkpoint("bfloat16")))
    with ExitStack() as stack:
        vllm = (
            stack.enter_context(VllmPeer(options.peers))
            if options.peers and VllmPeer.installed(options.peers)
            else None
        )
        llama = (
            LlamaCppPeer(options.peers) if options.peers and LlamaCppPeer.installed(options.peers) else None
        )
        if any(map(options.wants, _step_names())):
            rows += _step_rows(options, devices, vllm, llama)
        rows += served_rows(options, vllm)
    return rows


def _step_names() -> list[str]:
    return (
        [f"prefill_{n}" for n in PROMPTS]
        + [f"decode_b{b}" for b in BATCHES]
        + [f"decode_b{b}_ctx2048" for b in LONG_CONTEXT_BATCHES]
        + [MIXED_ROW]
    )


def _step_rows(
    options: Options, devices: list[Any], vllm: VllmPeer | None, llama: LlamaCppPeer | None
) -> list[Row]:
    rows: list[Row] = []
    model = load(options.model, "bfloat16")
    common = {"dtype": "bfloat16", "max_tokens": model.cfg.max_position, "fingerprint": model.fingerprint}
    prefill = JaxPrefillEngine(model.cfg, model.params, num_slots=1, devices=devices, **common)
    prefill.warm_up()
    decode = JaxDecodeEngine(model.cfg, model.params, num_slots=max(BATCHES), **common)
    decode.warm_up()

    def add(name: str, ours: Callable[[], float], peer: Callable[[], float] | None, peer_name: str) -> None:
        if options.wants(name.split("@")[0]):
            row = measure(
                name,
                "tok/s",
                "higher",
                ours,
                peer,
                peer_name,
                rounds=options.rounds,
                turn_seconds=0.0 if options.quick else TURN_SECONDS,
            )
            rows.append(row)

    for n in PROMPTS:
        ours = lambda n=n: n / prefill_seconds(prefill, n)  # noqa: E731
        add(
            f"prefill_{n}",
            ours,
            (lambda n=n: n / vllm.seconds([fresh_prompt(n).tolist()], 1)) if vllm else None,
            VllmPeer.name,
        )
        if llama and n <= 2048:
            add(
                f"prefill_{n}@llama.cpp",
                ours,
                lambda n=n: llama.tokens_per_second(prompt=n),
                LlamaCppPeer.name,
            )
    for batch in BATCHES:
        tokens = batch * NUM_STEPS
        ours = lambda batch=batch, tokens=tokens: tokens / decode_seconds(decode, batch, CONTEXT)  # noqa: E731
        add(
            f"decode_b{batch}",
            ours,
            (lambda batch=batch, tokens=tokens: tokens / vllm_decode_seconds(vllm, batch, CONTEXT))
            if vllm
            else None,
            VllmPeer.name,
        )
        if llama and batch == 1:
            add(
                "decode_b1@llama.cpp",
                ours,
                lambda: llama.tokens_per_second(generate=NUM_STEPS),
                LlamaCppPeer.name,
            )
    for batch in LONG_CONTEXT_BATCHES:
        tokens = batch * NUM_STEPS
        add(
            f"decode_b{batch}_ctx2048",
            lambda batch=batch, tokens=tokens: tokens / decode_seconds(decode, batch, LONG_CONTEXT),
            (lambda batch=batch, tokens=tokens: tokens / vllm_decode_seconds(vllm, batch, LONG_CONTEXT))
            if vllm
            else None,
            VllmPeer.name,
        )
    batch = len(MIXED_SAMPLING)
    tokens = batch * NUM_STEPS
    add(
        MIXED_ROW,
        lambda: tokens / decode_seconds(decode, batch, CONTEXT, settings=MIXED_SAMPLING),
        lambda: tokens / decode_seconds(decode, batch, CONTEXT),
        "ours, all greedy",
    )
    return rows

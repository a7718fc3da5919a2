"""Faults on purpose: an answer is the oracle's or a clear error, and all books return to their start."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e.cluster import LocalCluster, wait_until
from fakes.engine import FORMAT, VOCAB_SIZE, FakeDecodeEngine, FakePrefillEngine, answer
from msgspec.structs import replace

from kvstore.errors import (
    DeadlineError,
    ExhaustedError,
    InternalError,
    InvalidError,
    NotFoundError,
    StaleError,
    StoreError,
    UnavailableError,
)
from kvstore.transfer import READ, WRITE, Faults
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.messages import DECODE
from mooncake_jax.prefill.config import PrefillConfig

Z = FORMAT.block_tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(31 * i + 7 * seed + i * i) % 200 for i in range(length)]


def is_part(request) -> bool:
    """KV of one layer group, not flags."""
    return request.local.nbytes == FORMAT.group_nbytes


def test_cancelled_at_any_moment_all_is_freed():
    with LocalCluster(
        prefill_engine=lambda: FakePrefillEngine(seconds_per_token=0.0005),
        decode_engine=lambda: FakeDecodeEngine(seconds_per_step=0.001),
    ) as cluster:
        rng = random.Random(7)
        cluster.ask(prompt(60))
        outcomes = []

        def cancelled(i: int) -> None:
            call = cluster.call(prompt(20 + 8 * (i % 6), seed=i % 4), 20)
            timer = threading.Timer(rng.uniform(0.0, 0.12), call.cancel)
            timer.start()
            try:
                outcomes.append(call.run().tokens == answer(call.request.tokens, 20))
            except StoreError:
                outcomes.append("cancelled")
            finally:
                timer.cancel()
                timer.join()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(cancelled, range(80)))
        assert set(outcomes) <= {True, "cancelled"}
        assert outcomes.count("cancelled") > 10
        cluster.check_idle()
        for i in range(10):
            tokens = prompt(20 + i, seed=i % 4)
            assert cluster.ask(tokens).tokens == answer(tokens, 6)


def test_a_bad_handle_is_an_error_and_is_counted():
    decode = DecodeConfig(staging_nbytes=1 << 20, staging_lease_seconds=2.0, quarantine_seconds=0.1)
    with LocalCluster(num_prefill=1, num_decode=1, decode=decode) as cluster:
        tokens = prompt(3 * Z)
        call = cluster.call(tokens)
        placement = call.place()
        handle = call.reserve(placement)
        first, _ = call.prefill(placement, handle)
        wrong = {
            "made up": (NotFoundError, replace(handle, slot=77)),
            "of the future": (NotFoundError, replace(handle, generation=handle.generation + 5)),
            "of fewer blocks": (NotFoundError, replace(handle, num_blocks=2)),
            "of more blocks": (NotFoundError, replace(handle, num_blocks=1000)),
            "elsewhere": (NotFoundError, replace(handle, offset=handle.offset + 4096)),
            "of another epoch": (StaleError, replace(handle, epoch=handle.epoch ^ 1)),
            "of another instance": (StaleError, replace(handle, instance="decode-9")),
        }

        def refused(kind: type[StoreError], bad) -> None:
            before = cluster.counters("decode-0")["failed_transfers"]
            with pytest.raises(kind):
                call.generate(placement, bad, first.token)
            assert cluster.counters("decode-0")["failed_transfers"] == before + 1

        for kind, bad in wrong.values():
            refused(kind, bad)
        before = cluster.counters("decode-0")["failed_transfers"]
        thief = cluster.call(prompt(3 * Z, seed=9))
        with pytest.raises(NotFoundError):
            thief.generate(placement, handle, first.token)
        assert cluster.counters("decode-0")["failed_transfers"] == before + 1
        events = call.generate(placement, handle, first.token)
        assert [first.token, *(t for event in events for t in event.tokens)] == answer(tokens, 6)
        refused(StaleError, handle)  # used twice

        expiring = call.reserve(placement)
        wait_until(lambda: cluster.books("decode-0")["staging_reserved"] == 0, "the lease is over")
        refused(StaleError, expiring)
        other = cluster.call(prompt(3 * Z, seed=5))
        reused = other.reserve(placement)
        assert reused.slot == expiring.slot
        refused(StaleError, expiring)  # its memory is another's now
        released = cluster.stub(placement.decode.address, DECODE)
        released.release(reused)
        refused(StaleError, reused)
        call.end(ok=True)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_kv_damaged_on_its_way_to_decode_is_an_error_never_a_wrong_token(path):
    host_ids = (lambda name: "one") if path == "shm" else (lambda name: name)
    with LocalCluster(num_prefill=1, num_decode=1, host_ids=host_ids) as cluster:
        tokens = prompt(3 * Z + 1)
        transfer = cluster.instances["prefill-0"].transfer
        for byte in (0, 7, FORMAT.group_nbytes - 1):
            transfer.faults = Faults(corrupt_byte=byte, only=lambda request: is_part(request))
            with pytest.raises(InternalError, match="arrived damaged"):
                cluster.ask(tokens)
        transfer.faults = None
        assert cluster.ask(tokens).tokens == answer(tokens, 6)
        assert cluster.counters("decode-0")["failed_transfers"] == 3


def test_kv_that_never_arrives_is_an_error_in_bounded_time():
    decode = DecodeConfig(staging_nbytes=1 << 20, quarantine_seconds=0.1, arrival_seconds=0.2)
    with LocalCluster(num_prefill=1, num_decode=1, decode=decode) as cluster:
        call = cluster.call(prompt(3 * Z))
        placement = call.place()
        handle = call.reserve(placement)
        with pytest.raises(DeadlineError, match="only 0 of 6 layer groups"):
            call.generate(placement, handle, 5)
        call.end(ok=False)


def test_a_dead_path_to_decode_fails_the_request_and_only_it():
    with LocalCluster(num_prefill=1, num_decode=2) as cluster:
        tokens = prompt(6 * Z)
        dead = cluster.instances["decode-0"].transfer.peer.epoch
        cluster.instances["prefill-0"].transfer.faults = Faults(
            dead=True, only=lambda request: request.opcode is WRITE and request.target.peer.epoch == dead
        )
        with pytest.raises(UnavailableError, match="KV stream to decode instance 'decode-0'"):
            cluster.ask(tokens, avoid=["decode-1"])
        assert cluster.ask(tokens, avoid=["decode-0"]).tokens == answer(tokens, 6)


def test_a_prefix_damaged_on_its_way_is_recomputed():
    with LocalCluster(num_prefill=2, num_decode=1) as cluster:
        tokens = prompt(6 * Z + 1)
        here = cluster.ask(tokens).placement.prefill.name
        there = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[here]
        cluster.wait_held(here, tokens, range(6))
        cluster.instances[there].transfer.faults = Faults(corrupt_byte=3, only=lambda r: r.opcode is READ)
        got = cluster.ask(tokens, avoid=[here])
        assert got.placement.fetch_from == here
        assert (got.tokens, got.first.cached_tokens) == (answer(tokens, 6), 0)


def test_a_prefix_that_breaks_off_half_way_starts_the_request_again():
    with LocalCluster(num_prefill=2, num_decode=1) as cluster:
        tokens = prompt(6 * Z + 1)
        here = cluster.ask(tokens).placement.prefill.name
        there = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[here]
        cluster.wait_held(here, tokens, range(6))
        computing = threading.Event()
        engine, transfer = cluster.engines[there], cluster.instances[there].transfer
        engine.before_group = lambda slot, start, group: computing.set()
        reads = []

        def second_group(request) -> bool:
            if request.opcode is not READ or not is_part(request):
                return False
            reads.append(request)
            return len(reads) > 6 and computing.wait(10.0)  # the first group is being computed upon

        transfer.faults = Faults(dead=True, only=second_group)
        got = cluster.ask(tokens, avoid=[here])
        assert len(reads) > 6
        assert (got.tokens, got.first.cached_tokens, got.first.fetched_tokens) == (answer(tokens, 6), 0, 0)
        transfer.faults = None
        engine.before_group = None
        assert cluster.ask(tokens, avoid=[here]).first.cached_tokens == 6 * Z


def test_a_holder_that_is_gone_costs_only_the_reuse():
    with LocalCluster(num_prefill=2, num_decode=1) as cluster:
        tokens = prompt(6 * Z + 1)
        here = cluster.ask(tokens).placement.prefill.name
        cluster.wait_held(here, tokens, range(6))
        call = cluster.call(tokens)
        placement = call.place(avoid=[here])
        assert placement.fetch_from == here
        cluster.instances[here].home.remove(placement.keys[2:4])
        handle = call.reserve(placement)
        first, _ = call.prefill(placement, handle)
        assert (first.cached_tokens, first.fetched_tokens) == (2 * Z, 2 * Z)
        events = call.generate(placement, handle, first.token)
        assert [first.token, *(t for event in events for t in event.tokens)] == answer(tokens, 6)
        call.end(ok=True)
        call = cluster.call(prompt(3 * Z, seed=1))
        placement = replace(call.place(), fetch_from="no-such-node", fetch_blocks=2)
        handle = call.reserve(placement)
        first, _ = call.prefill(placement, handle)
        assert (first.token, first.cached_tokens) == (answer(call.request.tokens, 1)[0], 0)
        cluster.stub(placement.decode.address, DECODE).release(handle)
        call.end(ok=False)


def test_a_full_decode_instance_says_so():
    decode = DecodeConfig(staging_nbytes=3 * 4096, quarantine_seconds=0.1, max_waiting=2)
    engine = lambda: FakeDecodeEngine(num_slots=1)  # noqa: E731
    with LocalCluster(num_prefill=1, num_decode=1, decode=decode, decode_engine=engine) as cluster:
        call = cluster.call(prompt(Z))
        placement = call.place()
        handle = call.reserve(placement)  # 4096 of flags, one block
        with pytest.raises(ExhaustedError, match="staging memory"):
            call.reserve(placement)
        stub = cluster.stub(placement.decode.address, DECODE)
        stub.release(handle)
        wait_until(lambda: cluster.books("decode-0")["staging_nbytes"] == 0, "the released memory has rested")
        with pytest.raises(InvalidError, match="bytes of staging memory, there are 12288 in all"):
            cluster.call(prompt(250), 6).reserve(placement)
        with pytest.raises(InvalidError, match="prompt of 255 tokens and an answer of up to 6 exceed"):
            cluster.call(prompt(255), 6).reserve(placement)
        call.end(ok=False)
        assert cluster.ask(prompt(Z)).tokens == answer(prompt(Z), 6)

    decode = DecodeConfig(staging_nbytes=1 << 20, quarantine_seconds=0.1, max_waiting=2)
    with LocalCluster(num_prefill=1, num_decode=1, decode=decode, decode_engine=engine) as cluster:
        call = cluster.call(prompt(Z))
        placement = call.place()
        handles = [call.reserve(placement) for _ in range(3)]
        with pytest.raises(ExhaustedError, match="3 requests are reserved or running here, the limit is 3"):
            call.reserve(placement)
        for handle in handles:
            cluster.stub(placement.decode.address, DECODE).release(handle)
        call.end(ok=False)


def test_a_full_prefill_queue_says_so():
    gate = threading.Event()
    engine = lambda: FakePrefillEngine(before_group=lambda slot, start, group: gate.wait(20))  # noqa: E731
    config = PrefillConfig(max_queue=2)
    with (
        LocalCluster(num_prefill=1, num_decode=1, prefill=config, prefill_engine=engine) as cluster,
        ThreadPoolExecutor(2) as pool,
    ):
        running = [pool.submit(cluster.ask, prompt(9, seed=i)) for i in range(2)]
        wait_until(lambda: cluster.books("prefill-0")["queued_requests"] == 2, "two are queued")
        with pytest.raises(ExhaustedError, match="the limit is 2"):
            cluster.ask(prompt(9, seed=2))
        gate.set()
        assert [one.result().tokens for one in running] == [answer(prompt(9, seed=i), 6) for i in range(2)]


def test_an_error_of_the_prefill_engine_fails_its_request_only():
    with LocalCluster(num_prefill=1, num_decode=1) as cluster:
        engine = cluster.engines["prefill-0"]
        long, bad = prompt(200), prompt(3 * Z, seed=1)
        first_tile, go = threading.Event(), threading.Event()

        def before_group(slot: int, start: int, group: int) -> None:
            first_tile.set()
            assert go.wait(20)
            if slot == 1:  # the long one has slot 0
                raise RuntimeError("out of memory, say")

        engine.before_group = before_group
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(cluster.ask, long)
            assert first_tile.wait(20)
            broken = pool.submit(cluster.ask, bad)
            wait_until(lambda: cluster.books("prefill-0")["queued_requests"] == 2, "both are there")
            go.set()
            with pytest.raises(InternalError, match="RuntimeError: out of memory, say"):
                broken.result()
            assert running.result().tokens == answer(long, 6)
        engine.before_group = None
        assert cluster.ask(bad).tokens == answer(bad, 6)


def test_an_error_of_the_decode_engine_fails_who_was_in_the_step():
    with LocalCluster(num_prefill=1, num_decode=1) as cluster:
        engine = cluster.engines["decode-0"]
        active, inserting = prompt(6), prompt(12 * Z, seed=1)
        in_batch, go, inserted = threading.Event(), threading.Event(), []
        insert = engine.insert

        def count(slot: int, first_block: int, blocks) -> None:
            inserted.append((slot, first_block))
            insert(slot, first_block, blocks)

        def before_step(rows) -> None:
            in_batch.set()
            assert go.wait(20)
            if (1, 4) in inserted:
                engine.before_step = None
                raise RuntimeError("the step broke")

        engine.insert, engine.before_step = count, before_step
        with ThreadPoolExecutor(2) as pool:
            broken = pool.submit(cluster.ask, active, 200)
            assert in_batch.wait(20)
            running = pool.submit(cluster.ask, inserting)
            wait_until(lambda: cluster.books("decode-0")["waiting_requests"] == 1, "the other one waits")
            go.set()
            with pytest.raises(InternalError, match="the step broke"):
                broken.result()
            assert running.result().tokens == answer(inserting, 6)
        assert inserted.count((1, 0)) == 2, "it was not half-way inserted when the step broke"
        assert cluster.ask(active).tokens == answer(active, 6)


def test_staging_memory_is_free_while_the_answer_is_generated():
    in_batch, go = threading.Event(), threading.Event()

    def before_step(rows) -> None:
        in_batch.set()
        assert go.wait(60)

    engine = lambda: FakeDecodeEngine(before_step=before_step)  # noqa: E731
    with (
        LocalCluster(num_prefill=1, num_decode=1, decode_engine=engine) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(cluster.ask, prompt(9))
        assert in_batch.wait(60)
        books = cluster.books("decode-0")
        go.set()
        assert running.result().tokens == answer(prompt(9), 6)
        assert (books["used_slots"], books["staging_nbytes"]) == (1, 0)


def test_a_short_prompt_passes_a_long_one_at_a_tile_edge():
    first_tile, go, tiles = threading.Event(), threading.Event(), []

    def before_group(slot: int, start: int, group: int) -> None:
        if group == 0:
            tiles.append((slot, start))
        first_tile.set()
        assert go.wait(20)

    engine = lambda: FakePrefillEngine(before_group=before_group)  # noqa: E731
    with LocalCluster(num_prefill=1, num_decode=1, prefill_engine=engine) as cluster:
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(cluster.ask, prompt(200))
            assert first_tile.wait(20)
            short = pool.submit(cluster.ask, prompt(5, seed=1))
            wait_until(lambda: cluster.books("prefill-0")["queued_requests"] == 2, "both are there")
            go.set()
            assert long.result().tokens == answer(prompt(200), 6)
            assert short.result().tokens == answer(prompt(5, seed=1), 6)
        assert tiles[:3] == [(0, 0), (1, 0), (0, 8)]


def test_leaving_the_stream_stops_the_work_at_the_next_tile():
    tiles, go = threading.Semaphore(0), threading.Event()

    def before_group(slot: int, start: int, group: int) -> None:
        if group == 0:
            tiles.release()
        assert go.wait(20)

    engine = lambda: FakePrefillEngine(before_group=before_group)  # noqa: E731
    with LocalCluster(num_prefill=1, num_decode=1, prefill_engine=engine) as cluster:
        call = cluster.call(prompt(200))
        placement = call.place()
        handle = call.reserve(placement)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(call.prefill, placement, handle)
            assert tiles.acquire(timeout=20)
            call.cancel()
            with pytest.raises(StoreError):
                running.result()
            go.set()
        wait_until(lambda: cluster.books("prefill-0")["open_requests"] == 0, "the request is gone")
        assert cluster.engines["prefill-0"].computed_tokens <= 2 * cluster.engines["prefill-0"].tile_tokens
        cluster.stub(placement.decode.address, DECODE).release(handle)
        call.end(ok=False)


def test_an_instance_that_closes_ends_its_requests_with_an_error():
    started = threading.Event()
    engine = lambda: FakeDecodeEngine(seconds_per_step=0.1, before_step=lambda rows: started.set())  # noqa: E731
    cluster = LocalCluster(num_prefill=1, num_decode=1, decode_engine=engine)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(cluster.ask, prompt(9), 200)
            assert started.wait(20)
            cluster.instances["decode-0"].close()
            with pytest.raises(StoreError):
                running.result()
    finally:
        cluster.close()


def test_a_token_that_the_model_does_not_have_disturbs_nobody():
    with LocalCluster(num_prefill=1, num_decode=1) as cluster:
        with pytest.raises(InvalidError, match=f"token id {VOCAB_SIZE}: the vocabulary has {VOCAB_SIZE}"):
            cluster.ask([1, 2, VOCAB_SIZE])
        call = cluster.call(prompt(2 * Z))
        placement = call.place()
        handle = call.reserve(placement)
        call.prefill(placement, handle)
        with pytest.raises(InvalidError, match="token id 99999"):
            call.generate(placement, handle, 99999)
        call.release(placement, handle)
        call.end(ok=False)
        assert cluster.ask(prompt(2 * Z)).tokens == answer(prompt(2 * Z), 6)

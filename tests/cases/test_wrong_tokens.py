"""Wrong tokens where KV is moved, reused, padded or evicted: an answer is the oracle's or a clear error.

Reported in public as
- vllm-project/vllm#52234: a failed, used or stale transfer reference is answered with junk;
- LMCache/LMCache#4463, ggml-org/llama.cpp#4902: the same greedy request gets another answer each time;
- vllm-project/vllm#52617: all KV arrived, and yet the first token is wrong;
- tenstorrent/tt-metal#56324, tenstorrent/vllm#415: padding writes into other requests' pages.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases.judge import MAX_TOKENS, Judge, text
from e2e.cluster import Answer, Call, wait_until
from e2e.real import CFG, Z, local_cluster
from msgspec.structs import replace

from kvstore.errors import InternalError, NotFoundError, StaleError, StoreError
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.engine.contract import GroupKV
from mooncake_jax.equality import TOLERANCES, compare
from mooncake_jax.request import FirstToken, Placement, StagingHandle
from mooncake_jax.staging_layout import StagingLayout

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def judge(oracle):
    return Judge(oracle)


# vllm-project/vllm#52234


class Staged:
    """A request whose KV has been streamed to decode."""

    def __init__(self, cluster, prompt: list[int]):
        self.cluster, self.prompt = cluster, prompt
        self.call: Call = cluster.call(prompt, MAX_TOKENS)
        self.placement: Placement = self.call.place()
        self.handle: StagingHandle = self.call.reserve(self.placement)
        self.first: FirstToken

    def prefill(self) -> Staged:
        self.first, self.done = self.call.prefill(self.placement, self.handle)
        return self

    def generate(self, handle: StagingHandle | None = None) -> Answer:
        events = self.call.generate(self.placement, handle or self.handle, self.first.token)
        tokens = [self.first.token, *(token for event in events for token in event.tokens)]
        logprobs = [self.first.logprob, *(one for event in events for one in event.logprobs)]
        return Answer(tokens, logprobs, events[-1].finish, self.first, self.done, self.placement)

    def failed(self, error: type[StoreError], handle: StagingHandle | None = None) -> None:
        """An error, not an answer, and decode counted it."""
        before = self.cluster.counters("decode-0")["failed_transfers"]
        with pytest.raises(error):
            self.generate(handle)
        assert self.cluster.counters("decode-0")["failed_transfers"] == before + 1


def one_region(engines, num_blocks: int = 8) -> DecodeConfig:
    """Staging memory for one prompt of `num_blocks` blocks: whoever comes next gets the same memory."""
    nbytes = StagingLayout(engines[1][0].format, num_blocks).nbytes
    return DecodeConfig(
        staging_nbytes=nbytes, staging_lease_seconds=2.0, quarantine_seconds=0.1, arrival_seconds=1.0
    )


@TRANSPORTS
def test_a_reference_that_is_not_good_is_an_error_and_is_counted(transport, engines, judge):
    with local_cluster(engines, 1, transport, one_region(engines)) as cluster:
        one = Staged(cluster, text(8 * Z - 3, seed=1)).prefill()
        one.failed(NotFoundError, replace(one.handle, slot=99))  # made up
        one.failed(NotFoundError, replace(one.handle, num_blocks=9))  # blocks out of range
        one.failed(NotFoundError, replace(one.handle, num_blocks=2**30))
        one.failed(NotFoundError, replace(one.handle, offset=4096))
        one.failed(StaleError, replace(one.handle, epoch=one.handle.epoch ^ 1))
        judge.right(one.prompt, one.generate())
        one.failed(StaleError)  # used twice

        other = Staged(cluster, text(8 * Z, seed=2)).prefill()  # in the memory of the first
        assert other.handle.offset == one.handle.offset
        one.failed(StaleError)
        one.failed(NotFoundError, replace(one.handle, generation=other.handle.generation + 1))
        judge.right(other.prompt, other.generate())

        late = Staged(cluster, text(8 * Z, seed=3))
        wait_until(lambda: cluster.books("decode-0")["staging_reserved"] == 0, "the lease is over")
        late.first, late.done = one.first, one.done
        late.failed(StaleError)
        for staged in (one, other, late):
            staged.call.end(ok=True)
        judge.canary(cluster)


@TRANSPORTS
@pytest.mark.parametrize("when", ["before", "after"])
def test_late_kv_for_a_lost_reservation_never_becomes_another_prompts_answer(transport, when, engines, judge):
    """A prefill so late that its reservation is over writes where another prompt's KV is now."""
    with local_cluster(engines, 1, transport, one_region(engines)) as cluster:
        late = Staged(cluster, text(8 * Z, seed=4))
        wait_until(lambda: cluster.books("decode-0")["staging_nbytes"] == 0, "the late one's lease is over")
        other = Staged(cluster, text(8 * Z, seed=5))
        assert other.handle.offset == late.handle.offset
        if when == "before":
            late.prefill()
        other.prefill()
        if when == "after":
            late.prefill()
        error = judge.right_or_error(other.prompt, other.generate)
        assert (error is None) == (when == "before")
        late.failed(StaleError)
        for staged in (other, late):
            staged.call.end(ok=True)
        judge.canary(cluster)


class Interrupted:
    """A decode engine; `before_insert` is called once, before its next `insert`."""

    def __init__(self, engine):
        self._engine, self.before_insert = engine, lambda: None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def insert(self, *args):
        before, self.before_insert = self.before_insert, lambda: None
        before()
        self._engine.insert(*args)


def test_late_kv_is_noticed_even_after_the_prompt_was_found_whole(engines, judge):
    """It arrives while the other prompt, checked already, waits to be put into the device cache."""
    decode = Interrupted(engines[1][0])
    with local_cluster((engines[0], [decode]), 1, "shm", one_region(engines)) as cluster:
        late = Staged(cluster, text(8 * Z, seed=4))
        wait_until(lambda: cluster.books("decode-0")["staging_nbytes"] == 0, "the late one's lease is over")
        other = Staged(cluster, text(8 * Z, seed=5)).prefill()
        decode.before_insert = late.prefill
        other.failed(InternalError)
        for staged in (other, late):
            staged.call.end(ok=True)
        judge.canary(cluster)


# LMCache/LMCache#4463, ggml-org/llama.cpp#4902


@pytest.mark.parametrize("reuse", ["home", "fetched", "off"])
def test_four_times_the_same_request_is_four_times_the_same_answer(reuse, engines, judge):
    """Of a reused prefix only the rest is computed, in other tiles: equal within the tolerance, not by bit."""
    prompt = text(1502, seed=6)
    with local_cluster(engines, 2, "shm") as cluster:
        answers, here = [], ""
        for i in range(4):
            salt = f"tenant-{i}" if reuse == "off" else ""  # of its own: nothing to share
            avoid = [here] if reuse == "fetched" and i == 1 else ["prefill-1"] if reuse == "home" else []
            answers.append(cluster.ask(prompt, 16, avoid=avoid, salt=salt))
            here = answers[0].placement.prefill.name
            if i == 0:
                cluster.wait_held(here, prompt, range(len(prompt) // Z), salt)
        judge.canary(cluster)
    for answer in answers:
        judge.right(prompt, answer, 16)
    cached = [answer.first.cached_tokens for answer in answers]
    assert cached == [0] + [0 if reuse == "off" else 1502 // Z * Z] * 3
    assert (answers[1].first.fetched_tokens > 0) == (reuse == "fetched")


# vllm-project/vllm#52617


@TRANSPORTS
def test_a_whole_prompt_that_comes_from_elsewhere_is_right_from_the_first_token(transport, engines, judge):
    lengths = [n * Z + extra for n in (1, 2, 8) for extra in (-1, 0, 1)] + [1, 2, 33 * Z + 1]
    with local_cluster(engines, 2, transport) as cluster:
        for length in lengths:
            prompt = text(length, seed=100 + length)
            cold = cluster.ask(prompt, MAX_TOKENS)
            here = cold.placement.prefill.name
            if length >= Z:
                cluster.wait_held(here, prompt, range(length // Z))
            hit = cluster.ask(prompt, MAX_TOKENS, avoid=[here])
            assert hit.first.fetched_tokens == (length - 1) // Z * Z
            for answer in (cold, hit):
                judge.right(prompt, answer)
                assert answer.done.streamed_nbytes == -(-length // Z) * cluster.engines[here].format.nbytes
        judge.canary(cluster)


class Permuted:
    """A prefill engine with a fault: the KV that it gives away is in another order than it computed it."""

    def __init__(self, engine, order):
        self._engine, self._order = engine, order

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def prefill(self, *args, **fields):
        for item in self._engine.prefill(*args, **fields):
            yield self._order(item) if isinstance(item, GroupKV) else item


def layers(kv: GroupKV) -> GroupKV:
    return kv._replace(blocks=np.ascontiguousarray(kv.blocks[:, ::-1]))


def k_and_v(kv: GroupKV) -> GroupKV:
    return kv._replace(blocks=np.ascontiguousarray(kv.blocks[:, :, :, ::-1]))


def groups(kv: GroupKV) -> GroupKV:
    return kv._replace(group=1 - kv.group)


def heads(kv: GroupKV) -> GroupKV:
    return kv._replace(blocks=np.ascontiguousarray(kv.blocks[:, :, ::-1]))


@pytest.mark.parametrize("order", [layers, k_and_v, groups, heads])
def test_kv_in_another_order_is_far_outside_the_rule(order, engines, oracle):
    """The fault build: it arrives whole and undamaged, and nothing but the comparison can see it."""
    prompt = text(8 * Z + 1, seed=7)
    broken = [Permuted(engines[0][0], order)], engines[1]
    with local_cluster(broken, 1, "shm") as cluster:
        moved = cluster.ask(prompt, MAX_TOKENS)
        cluster.wait_held("prefill-0", prompt, range(8))
        reused = cluster.ask(prompt, MAX_TOKENS)
    assert reused.first.cached_tokens == 8 * Z
    for answer, first_wrong in ((moved, 1), (reused, 0)):
        report = compare(answer.tokens, answer.logprobs, oracle.score(prompt, answer.tokens), "float32")
        assert not report.equal
        assert report.first_violation.startswith(f"token {first_wrong} ")
        assert report.max_abs_dlogprob > 10 * TOLERANCES["float32"].logprob


# tenstorrent/tt-metal#56324, tenstorrent/vllm#415


def test_padding_touches_nobody(engines, judge):
    """16 at once just over an edge of a tile or block, while short ones go through the same slots."""
    tiles = [16, 32, 64, 128, 256, 512]
    prompts = [text(tile + 1, seed=tile) for tile in tiles]
    prompts += [
        text(n, seed=200 + n) for n in (300, 500, 529, 545, 1025, 2 * Z + 1, 7 * Z + 1, 9 * Z - 1, 513, 257)
    ]
    short = [text(1 + i % 5, seed=300 + i) for i in range(48)]
    jobs = [*prompts, *short]
    random.Random(6).shuffle(jobs)
    jobs = [*(text(6 * 512 + 1, seed=60 + i) for i in range(4)), *jobs]  # the others pass them at tile edges
    with local_cluster(engines, 2, "shm") as cluster, ThreadPoolExecutor(16) as pool:
        for _ in range(2):  # the second time, of most prompts only a tail is computed
            answers = list(pool.map(lambda prompt: cluster.ask(prompt, MAX_TOKENS), jobs))
            for prompt, answer in zip(jobs, answers, strict=True):
                judge.right(prompt, answer)
        judge.canary(cluster)


def test_padding_at_the_end_of_a_slot(engines, judge):
    """A padded tile on the last page reaches past the slot: past the array, writes would be moved back."""
    end = CFG.max_position
    whole = text(end - 1, seed=8)
    neighbour = text(end - 1, seed=9)
    with local_cluster(engines, 1, "shm") as cluster, ThreadPoolExecutor(4) as pool:
        judge.right(whole, cluster.ask(whole, 1), 1)
        for tail in (
            1,
            2,
            15,
            16,
            17,
            47,
            200,
            511,
        ):  # computed after a reused prefix, in a tile of another size
            start = (end - tail) // Z * Z
            prompt = [*whole[:start], *text(end - start - 1, seed=400 + tail)]
            cluster.wait_held("prefill-0", whole, range(start // Z))
            beside = pool.submit(cluster.ask, neighbour, 1)
            answer = cluster.ask(prompt, 1)
            assert answer.first.cached_tokens == start
            judge.right(prompt, answer, 1)
            judge.right(neighbour, beside.result(), 1)
        for length in (end - 2, end - MAX_TOKENS, end - Z, end - Z - 1):
            prompt, rest = whole[:length], min(end - length, Z + 1)
            judge.right(prompt, cluster.ask(prompt, rest), rest)
        judge.canary(cluster)

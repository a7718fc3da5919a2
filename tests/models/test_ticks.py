import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import ticks
from models.ticks import Chunk

PROMPTS = st.lists(st.integers(1, 200), min_size=1, max_size=6)
STAGES = st.sampled_from([1, 2, 4, 8])


def queue(lengths: list[int], chunk_tokens: int = 32) -> list[Chunk]:
    return [chunk for i, n in enumerate(lengths) for chunk in ticks.cut(i, i % 2, 0, n, chunk_tokens)]


@given(PROMPTS, STAGES)
def test_chunk_c_is_on_stage_x_at_tick_c_plus_x(lengths, num_stages):
    chunks = queue(lengths)
    ran = list(ticks.stream(chunks, num_stages))
    assert len(ran) == len(chunks) + num_stages - 1
    for x in range(num_stages):
        assert [tick[x] for tick in ran] == [None] * x + chunks + [None] * (num_stages - 1 - x)


@given(PROMPTS, STAGES)
def test_bubbles_are_those_of_one_prompt_however_many_are_queued(lengths, num_stages):
    chunks = queue(lengths)
    counted = ticks.occupancy(ticks.stream(chunks, num_stages))
    assert counted.busy == len(chunks) * num_stages
    C, X = len(chunks), num_stages
    assert counted.bubble_fraction == pytest.approx((X - 1) / (C + X - 1))


@given(st.integers(0, 50).map(lambda n: 8 * n), st.integers(1, 500), st.integers(1, 64))
def test_chunks_cover_what_is_not_cached_and_only_the_last_is_ragged(start, new, chunk_tokens):
    chunks = ticks.cut(3, 1, start, start + new, chunk_tokens)
    assert [chunks[0].start, chunks[-1].stop] == [start, start + new]
    assert all(a.stop == b.start for a, b in itertools.pairwise(chunks))
    assert {chunk.num_tokens for chunk in chunks[:-1]} <= {chunk_tokens}
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_nothing_to_compute_is_an_error():
    with pytest.raises(ValueError, match="request 7: no tokens to compute between 16 and 16"):
        ticks.cut(7, 0, 16, 16, 8)


@given(
    st.integers(0, 20).map(lambda n: 8 * n),
    st.integers(1, 5000),
    st.integers(1, 16),
    st.sampled_from([0.0, 1e-4, 0.01]),
)
def test_balanced_chunks_cover_the_same_tokens_at_block_edges(start, new, num_chunks, share):
    chunks = ticks.cut_balanced(0, 0, start, start + new, num_chunks, attention_share=share, multiple=8)
    assert [chunks[0].start, chunks[-1].stop] == [start, start + new]
    assert all(a.stop == b.start and b.start % 8 == 0 for a, b in itertools.pairwise(chunks))
    assert len(chunks) <= num_chunks


def test_balanced_chunks_take_equal_time_and_end_sooner():
    share, X = 1e-4, 4

    def seconds(chunk: Chunk) -> float:
        return chunk.num_tokens * (1 + share * (chunk.start + chunk.stop) / 2)

    equal = ticks.cut(0, 0, 0, 65_536, 4096)
    balanced = ticks.cut_balanced(0, 0, 0, 65_536, 16, attention_share=share, multiple=64)
    spread = [seconds(chunk) for chunk in balanced]
    assert max(spread) / min(spread) < 1.1
    assert ticks.finish_seconds(balanced, X, seconds)[-1] < ticks.finish_seconds(equal, X, seconds)[-1]


def test_a_stage_waits_for_the_one_before_and_for_itself():
    one, two = ticks.cut(0, 0, 0, 20, 10)
    assert ticks.finish_seconds([one, two], 3, lambda chunk: 1.0) == [3.0, 4.0]
    assert ticks.finish_seconds([one, two], 2, lambda chunk: 1.0, lambda chunk: 0.5) == [2.5, 3.5]

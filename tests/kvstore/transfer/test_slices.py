import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.slices import bounds_reason, cut, frame_nbytes, merge_adjacent, out_of_bounds

lengths_lists = st.lists(st.integers(0, 50), max_size=40)


@given(lengths_lists, st.integers(1, 30), st.integers(1, 7))
def test_cut_puts_every_byte_in_exactly_one_frame_in_order(lengths, max_nbytes, max_pieces):
    covered = []
    for frame in cut(np.array(lengths, np.int64), max_nbytes, max_pieces):
        assert frame.nbytes <= max_nbytes
        assert 1 <= frame.last - frame.first <= max_pieces
        if frame.last - frame.first == 1:
            covered.append((frame.first, frame.start, frame.nbytes))
        else:
            assert frame.start == 0
            covered += [(i, 0, lengths[i]) for i in range(frame.first, frame.last)]
            assert frame.nbytes == sum(lengths[frame.first : frame.last])
    bytes_of = [(i, at) for i, start, nbytes in covered for at in range(start, start + nbytes)]
    assert bytes_of == [(i, at) for i, length in enumerate(lengths) for at in range(length)]
    assert {i for i, _, _ in covered} == set(range(len(lengths)))  # empty requests travel too


def test_cut_packs_small_requests_and_splits_large_ones():
    assert cut(np.array([4, 4, 4, 25, 1]), 10) == [
        (0, 2, 0, 8),
        (2, 3, 0, 4),
        (3, 4, 0, 10),
        (3, 4, 10, 10),
        (3, 4, 20, 5),
        (4, 5, 0, 1),
    ]


def test_frames_shrink_so_that_every_lane_has_one():
    assert frame_nbytes(8 << 20, lanes=2) == 4 << 20
    assert frame_nbytes(1 << 40, lanes=2) == 16 << 20
    assert frame_nbytes(0, lanes=4) == 1 << 20


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), max_size=20),
    st.integers(0, 2**63 - 1),
)
def test_out_of_bounds_agrees_with_unbounded_integers(table, nbytes):
    offsets, lengths = np.array([t[0] for t in table], np.int64), np.array([t[1] for t in table], np.int64)
    expected = [i for i, (o, n) in enumerate(table) if o < 0 or n < 0 or o + n > nbytes]
    assert out_of_bounds(offsets, lengths, nbytes).tolist() == expected


@pytest.mark.parametrize(
    ("offset", "length", "fits"),
    [(0, 10, True), (10, 0, True), (11, 0, False), (1, 10, False), (2**63 - 1, 1, False)],
)
def test_out_of_bounds_at_the_edges_of_ten_bytes(offset, length, fits):
    assert (out_of_bounds(np.array([offset]), np.array([length]), 10).size == 0) == fits


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=30))
def test_merge_keeps_the_bytes_and_their_order(table):
    offsets, lengths = np.array([t[0] for t in table], np.int64), np.array([t[1] for t in table], np.int64)
    merged = merge_adjacent(offsets, lengths)

    def spelled(starts, sizes):
        return [at for o, n in zip(starts.tolist(), sizes.tolist(), strict=True) for at in range(o, o + n)]

    assert spelled(*merged) == spelled(offsets, lengths)


def test_merge_joins_a_run():
    starts, sizes = merge_adjacent(np.array([0, 16, 32, 64]), np.array([16, 16, 16, 8]))
    assert (starts.tolist(), sizes.tolist()) == ([0, 64], [48, 8])


def test_the_reason_names_range_and_segment():
    assert (
        bounds_reason(np.array([7]), np.array([9]), 0, "kv", 10)
        == "9 bytes at 7 are out of bounds of segment 'kv' of 10 bytes"
    )

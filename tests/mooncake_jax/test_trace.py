"""The trace reader names what is wrong and where; statistics of hand-made traces, and of the public ones."""

import os
from pathlib import Path

import pytest

from kvstore.errors import InvalidError
from mooncake_jax.trace import Trace, TraceRequest, leading, read_trace, write_trace

PUBLIC = Path(os.environ.get("MOONCAKE_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
GOOD = '{"timestamp": 5, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}'


def read(tmp_path, *lines):
    path = tmp_path / "some_trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return read_trace(path)


def test_what_is_written_is_read(tmp_path):
    trace = Trace("mine", [TraceRequest(0, 512, 1, [7]), TraceRequest(9, 513, 2, [7, 8])])
    write_trace(tmp_path / "mine_trace.jsonl", trace)
    assert read_trace(tmp_path / "mine_trace.jsonl") == trace
    assert read_trace(tmp_path / "mine_trace.jsonl", limit=1) == trace.head(1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2"),
        ("nonsense", "line 2"),
        (GOOD.replace("5", '"5"', 1), r"line 2: .*timestamp"),
        (GOOD.replace("3", "0", 1), r"line 2: .*output_length"),
        (GOOD.replace("5", "4", 1), "line 2: timestamp 4 after 5"),
        (
            GOOD.replace("1100", "1025").replace("2]", "2, 3]"),
            "line 2: 4 hash_ids for 1025 tokens, expected 3",
        ),
        (GOOD.replace("[0, 1, 2]", "[1, 0, 2]"), "line 2: block 1 follows -1 here and 0 earlier"),
        (GOOD.replace("[0, 1, 2]", "[0, 1, -2]"), r"line 2: .*hash_ids"),
        (GOOD.replace("}", ', "model": 1}'), "line 2: .*model"),
        (GOOD.replace('"output_length": 3, ', ""), "line 2: .*output_length"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(InvalidError, match=f"some_trace.jsonl, {message}"):
        read(tmp_path, GOOD, line)


def test_an_empty_or_missing_file_is_an_error(tmp_path):
    with pytest.raises(InvalidError, match="has no lines"):
        read(tmp_path)
    with pytest.raises(InvalidError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def test_statistics_count_full_blocks_of_leading_runs():
    trace = Trace(
        "t",
        [
            TraceRequest(0, 1024, 10, [0, 1]),
            TraceRequest(500, 1024, 20, [0, 1]),  # all cached, but one token is computed
            TraceRequest(2000, 2048, 30, [0, 5, 1, 6]),  # 1 is known, but not after 5
        ],
    )
    statistics = trace.statistics
    assert (statistics.num_requests, statistics.span_seconds, statistics.num_blocks) == (3, 2.0, 4)
    assert (statistics.mean_output_tokens, statistics.longest_input_tokens) == (20.0, 2048)
    assert statistics.cached_tokens == pytest.approx((1023 + 512) / 4096)
    assert statistics.cached_per_request == pytest.approx((1023 / 1024 + 512 / 2048) / 3)


def test_a_partial_block_is_not_reused():
    trace = Trace("t", [TraceRequest(0, 600, 1, [0, 1]), TraceRequest(0, 600, 1, [0, 1])])
    assert trace.statistics.cached_tokens == pytest.approx(512 / 1200)


def test_copies_arrive_together_and_share_nothing():
    trace = Trace("t", [TraceRequest(0, 600, 1, [0, 1]), TraceRequest(8, 1024, 1, [0, 3])]).superposed(3)
    assert [request.timestamp for request in trace.requests] == [0, 0, 0, 8, 8, 8]
    assert [request.hash_ids for request in trace.requests[:3]] == [[0, 1], [4, 5], [8, 9]]
    assert trace.requests[5].hash_ids == [8, 11]


def test_leading():
    assert leading([1, 2, 3], {1, 3}) == 1
    assert leading([1, 2], {1, 2}) == 2
    assert leading([], {1}) == 0


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here (MOONCAKE_TRACES)")
@pytest.mark.parametrize(
    ("name", "num", "mean_input", "mean_output", "cached"),
    [("conversation", 12_031, 12_035, 343, 0.373), ("synthetic", 3_993, 15_325, 149, 0.650)],
)
def test_the_public_traces_are_those_of_table_2(name, num, mean_input, mean_output, cached):
    statistics = read_trace(PUBLIC / f"{name}_trace.jsonl").statistics
    assert statistics.num_requests == num
    assert statistics.mean_input_tokens == pytest.approx(mean_input, abs=1)
    assert statistics.mean_output_tokens == pytest.approx(mean_output, abs=1)
    assert statistics.cached_tokens == pytest.approx(cached, abs=0.001)


def test_a_thinned_trace_has_whole_conversations():
    chains = [[0, 2], [0, 3], [0, 2, 5], [0], [0, 4, 6], [0], [0, 3, 7]]
    trace = Trace("t", [TraceRequest(i, 512 * len(chain), 1, chain) for i, chain in enumerate(chains)])
    thinned = trace.thinned(2)
    assert [request.hash_ids for request in thinned.requests] == [[0, 2], [0, 2, 5], [0, 4, 6]]
    assert trace.thinned(1).requests == trace.requests
    with pytest.raises(InvalidError, match="one conversation in 0"):
        trace.thinned(0)

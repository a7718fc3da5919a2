"""Prompts by block: read from a trace, or generated with prefixes that are shared."""

import pytest

from launch.benchmarks.prompts import TRACE_FILE, TraceError, generate, read_trace, trace_file


def test_a_trace_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / TRACE_FILE
    path.write_text('{"timestamp": 0, "hash_ids": [0, 1]}\n{"hash_ids": [0]}\n{"hash_ids": [7]}\n')
    assert read_trace(path, 2) == [[0, 1], [0]]
    assert trace_file(tmp_path) == trace_file(path) == path


@pytest.mark.parametrize("line", ["nonsense", '{"timestamp": 1}', '{"hash_ids": ["a"]}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2"):
        read_trace(path, 10)


def test_an_empty_or_missing_trace_is_an_error(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(TraceError, match="no lines"):
        read_trace(tmp_path / "empty", 10)
    with pytest.raises(TraceError, match="nowhere"):
        read_trace(tmp_path / "nowhere", 10)


def test_generated_prompts_continue_earlier_ones():
    prompts = generate(2000, seed=3)
    seen, reused = set(), 0
    for prompt in prompts:
        reused += sum(block in seen for block in prompt)
        seen.update(prompt)
    assert prompts == generate(2000, seed=3)
    assert 0.3 < reused / sum(map(len, prompts)) < 0.9
    parents = {}  # a block names everything before it: it never has two different ones
    for prompt in prompts:
        for parent, block in zip([None, *prompt], prompt, strict=False):
            assert parents.setdefault(block, parent) == parent

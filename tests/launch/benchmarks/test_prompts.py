"""Prompts by block: read from a trace, or generated with prefixes that are shared."""

import pytest

from launch.benchmarks.prompts import TRACE_FILE, generate, trace_file, traced
from launch.process import UsageError


def line(*ids, at=0):
    return f'{{"timestamp": {at}, "input_length": {512 * len(ids)}, "output_length": 1, "hash_ids": {list(ids)}}}\n'


def test_a_trace_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / TRACE_FILE
    path.write_text(line(0, 1) + line(0) + line(7))
    assert traced(path, 2) == [[0, 1], [0]]
    assert trace_file(tmp_path) == trace_file(path) == path


@pytest.mark.parametrize("bad", ["nonsense", '{"timestamp": 1}', line(1).replace("[1]", '["a"]').strip()])
def test_a_bad_line_is_named(tmp_path, bad):
    path = tmp_path / "trace.jsonl"
    path.write_text(line(1) + bad + "\n")
    with pytest.raises(UsageError, match=r"trace\.jsonl.*line 2"):
        traced(path, 10)


def test_an_empty_or_missing_trace_is_an_error(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="no lines"):
        traced(tmp_path / "empty", 10)
    with pytest.raises(UsageError, match="nowhere"):
        traced(tmp_path / "nowhere", 10)


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

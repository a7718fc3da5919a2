"""What a client knows before the directory's stream tells it."""

from __future__ import annotations

from kvstore.client.recent import RecentKeys

KEY = bytes(16)


def test_own_puts_and_removes_count_for_a_while():
    recent = RecentKeys(seconds=2.0)
    recent.note(KEY, "a", present=True, firm=True, now=0.0)
    recent.note(KEY, "b", present=False, firm=True, now=0.0)
    assert recent.correct(KEY, ["b", "c"], 1.9) == ["c", "a"]
    assert recent.correct(KEY, ["a"], 1.9) == ["a"]
    recent.heard("b", [KEY])
    assert recent.correct(KEY, ["b"], 1.9) == ["a"]
    assert recent.correct(KEY, ["b", "c"], 2.0) == ["b", "c"]


def test_a_holder_found_stale_counts_again_when_the_stream_names_it():
    recent = RecentKeys(seconds=2.0)
    recent.note(KEY, "a", present=False, firm=False, now=0.0)
    assert recent.correct(KEY, ["a", "b"], 1.0) == ["b"]
    recent.heard("b", [KEY])
    assert recent.correct(KEY, ["a", "b"], 1.0) == ["b"]
    recent.heard("a", [KEY])
    assert recent.correct(KEY, ["a", "b"], 1.0) == ["a", "b"]

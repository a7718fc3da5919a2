"""Changes not yet announced."""

from __future__ import annotations

from kvstore.node.changes import Changes

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))


def test_nothing_is_recorded_before_a_snapshot():
    changes = Changes(limit=10)
    changes.record(added=[A])
    assert changes.needed
    assert len(changes) == 0
    changes.restart([B], on_ssd=[C])
    assert not changes.needed
    assert changes.take(10) == ([B], [C], [])


def test_the_last_state_of_a_key_counts_and_removals_come_first():
    changes = Changes(limit=10)
    changes.restart([A, B])
    changes.record(removed=[A])
    changes.record(added=[C], removed=[B])
    changes.record(added=[B])
    assert changes.take(2) == ([C], [], [A])
    assert changes.take(2) == ([B], [], [])
    assert changes.take(2) == ([], [], [])


def test_a_key_falls_to_ssd_and_comes_back():
    changes = Changes(limit=10)
    changes.restart([A, B, C])
    changes.record(on_ssd=[A, B, C])
    changes.record(added=[A], removed=[B])
    assert changes.take(10) == ([A], [C], [B])


def test_too_many_changes_ask_for_a_snapshot():
    changes = Changes(limit=2)
    changes.restart([])
    changes.record(added=[A, B, C])
    assert changes.needed
    assert changes.take(5) == ([], [], [])

"""Prefix match: against a dictionary of sets, by random histories, and at size."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.directory.index import PrefixIndex

CHAIN = [number.to_bytes(16, "big") for number in range(8)]


def test_only_leading_runs_count():
    index = PrefixIndex()
    index.add("a", CHAIN[:3])
    index.add("b", [CHAIN[0], CHAIN[1], CHAIN[3]])
    index.add("c", CHAIN[1:])
    assert index.lengths(CHAIN) == {"a": 3, "b": 2}
    assert index.lengths(CHAIN[:1]) == {"a": 1, "b": 1}
    assert index.lengths([]) == {}
    assert index.runs(CHAIN) == [(2, 0b010), (3, 0b001)]


def test_bits_are_stable_and_given_again():
    index = PrefixIndex()
    assert [index.bit(name) for name in ("a", "b", "c", "b")] == [0, 1, 2, 1]
    index.add("b", CHAIN[:2])
    index.forget("b")
    assert index.lengths(CHAIN) == {}
    assert index.bit("d") == 1
    index.add("d", CHAIN[:1])
    assert index.lengths(CHAIN) == {"d": 1}


def test_removing_what_was_never_held_is_no_error():
    index = PrefixIndex()
    index.remove("nobody", CHAIN)
    index.add("a", CHAIN[:1])
    index.remove("a", CHAIN)
    index.forget("nobody")
    assert len(index) == 0
    assert index.nodes == ["a"]


def test_what_another_node_continues():
    index = PrefixIndex()
    index.add("prompt", CHAIN[:3])
    index.add("copy", CHAIN[:2])
    index.add("answer", CHAIN[3:6])
    index.add("shorter", CHAIN[3:5])
    assert index.continued(CHAIN, index.lengths(CHAIN)) == 3
    assert index.continued(CHAIN[:4], index.lengths(CHAIN[:4])) == 1
    assert index.continued(CHAIN[:3], index.lengths(CHAIN[:3])) == 0
    assert index.continued(CHAIN[3:], index.lengths(CHAIN[3:])) == 0  # a run of its own
    index.remove("answer", CHAIN[3:4])
    assert index.continued(CHAIN, index.lengths(CHAIN)) == 2
    assert index.continued(CHAIN, {}) == 0


NODES = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add to ssd", "remove", "forget")),
        st.sampled_from(NODES),
        st.sets(st.sampled_from(CHAIN)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_agrees_with_plain_sets(steps: list[tuple[str, str, set[bytes]]]):
    index, model = PrefixIndex(), {name: set() for name in NODES}
    on_ssd = {name: set() for name in NODES}
    for action, name, some in steps:
        if action == "add":
            index.add(name, some)
            model[name] |= some
            on_ssd[name] -= some
        elif action == "add to ssd":
            index.add(name, some, "ssd")
            model[name] |= some
            on_ssd[name] |= some
        elif action == "remove":
            index.remove(name, some)
            model[name] -= some
            on_ssd[name] -= some
        else:
            index.forget(name)
            model[name], on_ssd[name] = set(), set()
    expected = {}
    for name, held in model.items():
        length = 0
        while length < len(CHAIN) and CHAIN[length] in held:
            length += 1
        if length:
            expected[name] = length
    assert (index.lengths(CHAIN)) == expected
    for name, held in model.items():
        assert index.keys(name) == held
        assert index.keys(name, "ssd") == on_ssd[name]
        assert index.keys(name, "dram") == held - on_ssd[name]
        assert index.num_keys(name) == len(held)
    for key in CHAIN:
        assert index.replicas(key) == {
            name: "ssd" if key in on_ssd[name] else "dram" for name, held in model.items() if key in held
        }
    assert len(index) == len(set().union(*model.values()))


def test_many_nodes():
    index = PrefixIndex()
    rng = random.Random(1)
    chain = [rng.randbytes(16) for _ in range(100)]
    for number in range(200):
        index.add(f"n{number}", chain[: number // 2])
    assert (index.lengths(chain)) == {f"n{number}": number // 2 for number in range(2, 200)}


def test_who_else_holds_a_key():
    index = PrefixIndex()
    index.add("a", CHAIN[:2])
    index.add("b", CHAIN[1:3])
    assert index.held(CHAIN[:4]) == [True, True, True, False]
    assert index.held(CHAIN[:4], but="a") == [False, True, True, False]
    assert index.held(CHAIN[:1], but="a stranger") == [True]
    index.forget("b")
    assert index.held(CHAIN[:4], but="a") == [False] * 4

"""SIEVE, step by step by hand, and against a list that is searched from its start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.sieve import Sieve


def anyone(_):
    return True


def test_a_sequence_worked_by_hand():
    """The queue is written oldest first, * is a mark, the hand stands before |."""
    sieve = Sieve()
    for key in "ABCDEFG":
        sieve.add(key)
    for key in "ABG":
        sieve.use(key)  # |A* B* C D E F G*
    assert sieve.evict(anyone) == "C"  # A and B lose their marks: A B |D E F G*
    sieve.add("H")  # A B |D E F G* H
    sieve.use("A")
    sieve.use("D")  # A* B |D* E F G* H
    assert sieve.evict(anyone) == "E"  # A* B D |F G* H
    sieve.add("I")  # A* B D |F G* H I
    sieve.use("B")  # A* B* D |F G* H I
    assert sieve.evict(anyone) == "F"  # A* B* D |G* H I
    assert sieve.evict(anyone) == "H"  # A* B* D G |I
    assert sieve.evict(anyone) == "I"  # |A* B* D G: the hand begins anew
    assert sieve.evict(anyone) == "D"  # A B |G
    assert sieve.evict(anyone) == "G"
    assert [sieve.evict(anyone) for _ in range(3)] == ["A", "B", None]
    assert len(sieve) == 0


def test_what_may_not_leave_is_passed_over_and_keeps_its_mark():
    sieve = Sieve()
    for key in "ABC":
        sieve.add(key)
    sieve.use("A")
    assert sieve.evict(lambda key: key == "C") == "C"  # |A* B
    assert sieve.evict(lambda _: False) is None
    assert sieve.evict(anyone) == "B"  # A lost its mark only now
    assert sieve.evict(anyone) == "A"


def test_all_marked_means_the_oldest_goes_in_the_second_round():
    sieve = Sieve()
    for key in "ABC":
        sieve.add(key)
        sieve.use(key)
    assert sieve.evict(anyone) == "A"


def test_a_key_is_there_once():
    sieve = Sieve()
    sieve.add("A")
    with pytest.raises(ValueError, match="'A' is in the pool already"):
        sieve.add("A")
    sieve.remove("A")
    assert "A" not in sieve
    for wrong in (sieve.use, sieve.remove):
        with pytest.raises(KeyError):
            wrong("A")


class NaiveSieve:
    """`[key, is_marked]` oldest first, and the key that the hand stands on (None: at the start)."""

    def __init__(self):
        self.queue, self.hand = [], None

    def place(self, key):
        return [entry[0] for entry in self.queue].index(key)

    def remove(self, key):
        place = self.place(key)
        if self.hand == key:
            self.hand = self.queue[place + 1][0] if place + 1 < len(self.queue) else None
        del self.queue[place]

    def evict(self, may_leave):
        start = 0 if self.hand is None else self.place(self.hand)
        for entry in 2 * (self.queue[start:] + self.queue[:start]):
            if may_leave(entry[0]) and not entry[1]:
                self.hand = entry[0]
                self.remove(entry[0])
                return entry[0]
            if may_leave(entry[0]):
                entry[1] = False
        return None


keys = st.integers(0, 9)
steps = st.tuples(st.sampled_from(["use", "use", "evict", "remove"]), keys, st.frozensets(keys, max_size=3))


@given(st.lists(steps, max_size=200))
def test_it_does_what_a_naive_list_does(steps):
    """`use` of an absent key adds it; an eviction spares the step's set of keys."""
    sieve, naive = Sieve(), NaiveSieve()
    for verb, key, kept in steps:
        present = key in [entry[0] for entry in naive.queue]
        assert (key in sieve) == present
        if verb == "use" and present:
            sieve.use(key)
            naive.queue[naive.place(key)][1] = True
        elif verb == "use":
            sieve.add(key)
            naive.queue.append([key, False])
        elif verb == "remove" and present:
            sieve.remove(key)
            naive.remove(key)
        elif verb == "evict":
            assert sieve.evict(lambda k, kept=kept: k not in kept) == naive.evict(
                lambda k, kept=kept: k not in kept
            )
        assert len(sieve) == len(naive.queue)

"""Stop strings: the result does not depend on how the text was cut."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_jax.frontend.stops import StopMatcher

TEXT = st.text(alphabet="abé😀", max_size=24)
STOPS = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), max_size=4)


def first_complete(text, stops):
    """The definition, by brute force: cut before the longest of the stops that are complete first."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def run(pieces, stops):
    matcher, released = StopMatcher(stops), []
    for piece in pieces:
        released.append(matcher.push(piece))
    released.append(matcher.flush())
    return released, matcher.stopped


@given(TEXT, STOPS, st.lists(st.integers(1, 4), max_size=24))
@example("aab", ["aaa", "ab"], [1, 1, 1])
@example("abab", ["abb", "ba"], [2, 1, 1])
@example("aaab", ["aab"], [1, 1, 1, 1])
def test_any_cut_gives_the_same_text(text, stops, cuts):
    pieces, rest = [], text
    for size in cuts:
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)
    released, stopped = run(pieces, stops)
    assert ("".join(released), stopped) == first_complete(text, stops)


@given(TEXT, STOPS)
def test_what_is_released_never_begins_a_stop(text, stops):
    """Held back exactly as long as needed: released text plus the longest stop start is all."""
    matcher, released = StopMatcher(stops), ""
    for i, character in enumerate(text):
        released += matcher.push(character)
        if matcher.stopped:
            return
        seen = text[: i + 1]
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert released == seen[: len(seen) - held]


def test_held_text_is_released_when_the_match_fails():
    matcher = StopMatcher(["END."])
    assert [matcher.push(p) for p in ("the EN", "D", " of it")] == ["the ", "", "END of it"]
    assert not matcher.stopped


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.rails import COOLDOWN_SECONDS, MAX_COOLDOWN_SECONDS, Candidate, Health, Verdict, choose


def rail(rank=0, load=0, usable=True, room=True, tried=False):
    return Candidate(rank, load, usable, room, tried)


def test_of_the_nearest_usable_rails_the_least_loaded_is_taken():
    assert choose([rail(load=3), rail(load=2), rail(1, 0)]) == 1
    assert choose([rail(load=3), rail(load=2, usable=False), rail(1, 0)]) == 0
    assert choose([rail(load=2), rail(load=2)]) == 0


def test_a_farther_rail_is_taken_when_no_nearer_one_is_usable_not_when_they_are_busy():
    assert choose([rail(room=False), rail(1)]) is Verdict.WAIT
    assert choose([rail(usable=False), rail(1)]) == 1
    assert choose([rail(usable=False), rail(1, usable=False), rail(2)]) == 2


def test_a_usable_rail_may_be_tried_again_an_avoided_one_only_by_frames_that_have_not_tried_it():
    assert choose([rail(tried=True), rail(usable=False)]) == 0
    assert choose([rail(usable=False, tried=True), rail(usable=False)]) == 1
    assert choose([rail(usable=False, tried=True), rail(usable=False, room=False)]) is Verdict.WAIT
    assert choose([rail(usable=False, tried=True)] * 2) is Verdict.NOWHERE
    assert choose([]) is Verdict.NOWHERE


candidates = st.builds(
    Candidate, st.integers(0, 2), st.integers(0, 3), st.booleans(), st.booleans(), st.booleans()
)


@given(st.lists(candidates, max_size=6))
def test_no_choice_is_better_than_the_one_made(rails):
    choice = choose(rails)
    some_usable = any(each.is_usable for each in rails)
    eligible = [each for each in rails if each.is_usable or (not some_usable and not each.was_tried)]
    if not eligible:
        assert choice is Verdict.NOWHERE
        return
    nearest = [each for each in eligible if each.rank == min(e.rank for e in eligible)]
    free = [each for each in nearest if each.has_room]
    if not free:
        assert choice is Verdict.WAIT
        return
    assert isinstance(choice, int)
    assert rails[choice] in free
    assert rails[choice].nbytes_in_flight == min(each.nbytes_in_flight for each in free)


def test_a_failed_rail_is_avoided_for_a_cooldown_probed_once_and_used_again():
    health = Health()
    health.fail(10.0)
    assert not health.is_usable
    assert not health.wants_probe(10.0 + 0.9 * COOLDOWN_SECONDS)
    assert health.wants_probe(10.0 + COOLDOWN_SECONDS)
    health.is_probing = True
    assert not health.wants_probe(1000.0)
    health.recover()
    assert health.is_usable
    assert not health.wants_probe(1000.0)


def test_the_cooldown_doubles_with_failed_probes_up_to_a_limit_and_begins_anew_after_a_recovery():
    health, now, cooldowns = Health(), 0.0, []
    for _ in range(1200):  # a rail may be dead for days
        health.fail(now)
        cooldowns.append(health.avoided_until - now)
        now = health.avoided_until
        assert health.wants_probe(now)
        health.is_probing = True
    assert cooldowns[:3] == [COOLDOWN_SECONDS, 2 * COOLDOWN_SECONDS, 4 * COOLDOWN_SECONDS]
    assert all(a <= b for a, b in itertools.pairwise(cooldowns))
    assert cooldowns[-1] == MAX_COOLDOWN_SECONDS
    health.recover()
    health.fail(now)
    assert health.avoided_until - now == COOLDOWN_SECONDS


def test_all_that_fails_within_one_cooldown_is_one_failure():
    health = Health()
    for late in (0.0, 0.1, 0.9):
        health.fail(5.0 + late * COOLDOWN_SECONDS)
    assert (health.num_failures, health.avoided_until) == (1, 5.0 + COOLDOWN_SECONDS)
